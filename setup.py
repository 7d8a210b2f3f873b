"""The package is described in pyproject.toml; this file serves tools that call setup.py."""

from setuptools import setup

setup()

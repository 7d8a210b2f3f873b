"""Evaluation of trained models: perplexity, multiple choice by log-likelihood, generation with answer extraction."""

"""The first compilation of a kernel on a machine is told in one line, later ones, which are cached, are not."""

from mindspeed_ms.core import compiled
from mindspeed_ms.core.logging import logger


def test_only_a_compilation_that_is_not_cached_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(logger, "info", lambda text, *values: told.append(text % values))
    monkeypatch.setenv(compiled.CACHE_ENVIRONMENT_VARIABLE, str(tmp_path))
    for cache in (compiled.cache_directory, compiled._tell_once):
        cache.cache_clear()
    try:
        for name in ("gather", "scatter"):
            with compiled.one_process_compiles("kernels", name):
                pass
        assert len(told) == 1 and "compiling kernels" in told[0] and str(tmp_path) in told[0]
        folder = next(tmp_path.iterdir())
        (folder / "of_a_file").mkdir()
        (folder / "of_a_file" / "module.gather-12.py311.nbi").touch()
        compiled._tell_once.cache_clear()
        with compiled.one_process_compiles("kernels", "gather"):
            pass
        assert len(told) == 1
    finally:
        compiled.cache_directory.cache_clear()
        compiled._tell_once.cache_clear()

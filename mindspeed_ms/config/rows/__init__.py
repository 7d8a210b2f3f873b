"""The rows of the argument table, by subject; read them through ``mindspeed_ms.config.argument_table``."""

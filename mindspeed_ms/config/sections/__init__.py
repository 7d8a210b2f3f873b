"""The sections of the configuration, one module each; import them from `mindspeed_ms.config`."""

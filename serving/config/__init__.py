"""Settings: the configuration keys, their sources, and the precedence of the sources.

key: the name of a setting in a configuration file, such as `model_store` (`keys.py`).
kind: the type of a key's value (`kinds.py`).
finding: the effect of one configured value, or the problem with it (`resolve.py`).
model config: the file `model-config.yaml` of an archive (`model_settings.py`).
"""

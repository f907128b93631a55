"""The commands `torchere` and `torchserve`.

start: the options and the configuration file of `serve`, merged into a plan (`serve_options.py`).
launcher: TorchServe's start script, whose texts `torchserve` reproduces.
pid file: the file in which a background server records its process id (`torchserve.py`).
"""

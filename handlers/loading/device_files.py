"""Device files of accelerators, as patterns for `glob`. No imports: the server reads it without torch."""

# One of these exists where CUDA or ROCm has a GPU: NVIDIA's driver, WSL, Jetson, ROCm.
CUDA = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
# Intel's GPUs, too.
GPUS = (*CUDA, "/dev/dri/renderD*")
# All that drivers open, control files included; nvhost: Jetson's channels, accel: Gaudi and TPUs.
OPENED = ("/dev/nvidia*", "/dev/dxg", "/dev/nvmap", "/dev/nvhost-*", "/dev/kfd", "/dev/dri", "/dev/accel*")

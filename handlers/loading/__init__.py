"""Models as a worker holds them: weights, TorchScript, eager modules, ONNX, devices."""

"""The gRPC frontend: TorchServe's services, the Open Inference Protocol's, health and reflection."""

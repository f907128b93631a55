"""The models of the suite under Triton's Python backend; the parameter `kind` says which one this is."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.kind = config["parameters"]["kind"]["string_value"]
        self.sums = {}
        self.version = int(args["model_version"])
        self.is_bfloat16 = config["input"][0]["data_type"] == "TYPE_BF16"  # NumPy has no such type

    def execute(self, requests):
        if self.kind == "streaming":
            return self.stream(requests)
        return [pb_utils.InferenceResponse(output_tensors=getattr(self, self.kind)(one)) for one in requests]

    def identity(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "x")
        if self.is_bfloat16:
            return [pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())]
        return [pb_utils.Tensor("y", tensor.as_numpy())]

    def two(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "ab")
        return [pb_utils.Tensor("sum", a + b), pb_utils.Tensor("difference", a - b)]

    def versioned(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return [pb_utils.Tensor("y", x + x.dtype.type(self.version))]

    def summing(self, request):
        import numpy as np

        sequence, starts, x = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().sum())
            for name in ("ID", "START", "x")
        )
        self.sums[sequence] = x + (0 if starts else self.sums[sequence])
        return [pb_utils.Tensor("y", np.array([[self.sums[sequence]]], "i4"))]

    def failing(self, request):
        raise RuntimeError("this model always fails")

    def stream(self, requests):
        import numpy as np

        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy().ravel()[0])
            for number in range(count):
                tensor = pb_utils.Tensor("y", np.array([number], "i4"))
                sender.send(pb_utils.InferenceResponse(output_tensors=[tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

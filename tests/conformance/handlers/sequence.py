"""Sums what each sequence sends; a 0 ends it."""


class SequenceHandler:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        return [self.answer(row["body"], index, context) for index, row in enumerate(data)]

    def answer(self, value, index, context):
        name = context.get_sequence_id(index)
        headers = context.get_all_request_header(index)
        starts = headers.get(context.header_key_sequence_start)
        self.sums[name] = value + (0 if starts else self.sums.get(name, 0))
        context.set_response_header(index, "x-answer", str(self.sums[name]))
        if value == 0:
            context.set_response_header(index, context.header_key_sequence_end, name)
        return {
            "sum": self.sums[name],
            "made up": name.startswith("ts-seq-"),
            "headers": sorted(header for header in headers if header.startswith("ts_")),
        }

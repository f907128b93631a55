"""Answers in as many parts as the body says; 0 is an ordinary answer."""


class ContinuousHandler:
    def initialize(self, context):
        self.parts = {}  # left and answered, by request

    def handle(self, data, context):
        context.stopping_criteria = []
        return [self.part(row, context.get_request_id(index), context) for index, row in enumerate(data)]

    def part(self, row, request, context):
        wanted, done = self.parts.get(request) or (row["body"], 0)
        done += 1
        self.parts[request] = (wanted, done)
        context.stopping_criteria.append(lambda _: done >= wanted if wanted else None)
        return f"{done} {sorted(row)} "

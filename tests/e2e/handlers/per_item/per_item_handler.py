"""One batch, several outcomes: a status, a reason and headers for each request."""


class PerItem:
    def initialize(self, context):
        self.manifest = context.manifest

    def handle(self, data, context):
        answers = []
        for idx, row in enumerate(data):
            number = int(row["body"])
            context.set_response_header(idx, "X-Number", str(number))
            context.set_response_content_type(idx, "text/csv")
            if number < 0:
                context.set_response_status(code=422, phrase="Negative", idx=idx)
            answers.append(
                ",".join(
                    [
                        str(number),
                        str(len(data)),
                        str(context.get_request_header(idx, "X-Client")),
                        str(context.get_request_id(idx) == context.request_ids[idx]),
                    ]
                )
            )
        return answers

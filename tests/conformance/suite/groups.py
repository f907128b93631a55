"""All checks, in groups that share a deployment, in the order they run in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from suite import checks, files, handlers
from suite.checks import Check
from suite.deployment import Deployment
from suite.models import DIGIT_FORMS
from suite.rows import JAVA_ROWS, MANAGEMENT_ROWS


@dataclass(frozen=True, slots=True)
class Group:
    """Checks that share a deployment. `begin` starts it."""

    name: str
    begin: Callable[[Deployment], None]
    checks: tuple[Check, ...]


MODEL_ARCHIVER = "test_model_archiver.py"
NAMED = ("--model-name", "packed", "--handler", "h.py")
PACKINGS = (
    ("pack", NAMED, False),
    ("pack again without --force", NAMED, True),
    ("pack again with --force", (*NAMED, "--force"), False),
    ("pack without a handler", ("--model-name", "x"), True),
    ("pack without a name", ("--handler", "h.py"), True),
)
CONTROL = "test_model_control_mode.py"
CLOSED = Check(CONTROL, "register and unregister are off", checks.closed)
TOO_SLOW = Check("test_auto_recover.py", "an answer that takes too long", checks.too_slow_an_answer)


def strictly(check: Check) -> Check:
    """Return a check under the name of the deployments that have `strict_compatibility=true`."""
    return replace(check, file=f"{check.file}, strict_compatibility")


GROUPS = (
    Group(
        "open",
        checks.start_open,
        (
            *(checks.of_row(row) for row in (*JAVA_ROWS, *MANAGEMENT_ROWS)),
            Check(MODEL_ARCHIVER, "versions", checks.versions),
            Check(MODEL_ARCHIVER, "a file of the store, and a URL with its name", checks.local_then_url),
            Check(MODEL_ARCHIVER, "a URL, and the file that it left", checks.url_then_local),
            *(
                Check(MODEL_ARCHIVER, title, partial(checks.archiver, more, fails))
                for title, more, fails in PACKINGS
            ),
            *(
                Check("inference_data.json", f"a model that is {form}", partial(checks.digit, form))
                for form in DIGIT_FORMS
            ),
            Check("test_handler.py", "a handler that does not exist", checks.unknown_handler),
            Check("test_model_config.py", "batch size of the call, and of the file", checks.batch_sizes),
            Check("test_send_intermediate_prediction_response.py", "parts", checks.parts_of_an_answer),
            Check("test_gRPC_inference_api.py", "parts", checks.parts_over_grpc),
            Check("test_example_stateful_http.py", "two sequences at once", checks.sequences),
            Check("test_gRPC_inference_api.py", "a sequence", checks.sequences_over_grpc),
            Check("test_gRPC_inference_api.py", "register, predict, unregister", checks.grpc_of_a_model),
            *(
                Check("test_gRPC_management_apis.py", title, partial(checks.grpc_code, method, request, code))
                for title, method, request, code in checks.GRPC_CODES
            ),
            Check("test_startup_timeout.py", "a model that loads in time", checks.slow_start),
            Check("test_startup_timeout.py", "a model that does not", checks.too_slow_a_start),
            Check("test_startup_timeout.py", "the log of that", checks.log_of_too_slow_a_start),
            TOO_SLOW,
            Check("test_auto_recover.py", "the log of the recovery", checks.log_of_recovery),
            Check("test_handler_traceback_logging.py", "the whole traceback", checks.traceback),
        ),
    ),
    Group(
        "tokens",
        checks.start_with_tokens,
        (
            Check("test_token_authorization.py", "right, wrong and no key", checks.tokens),
            Check("test_token_authorization.py", "new keys", checks.new_tokens),
            Check("test_gRPC_token_authorization.py", "no key", checks.tokens_over_grpc),
            Check("test_token_authorization.py", "expired keys", checks.expired_tokens),
        ),
    ),
    Group(
        "control",
        checks.start_closed,
        (
            CLOSED,
            Check(CONTROL, "the flag counts before the file", checks.flag_before_file),
            Check(
                "test_model_control_mode.py", "the variable counts before both", checks.variable_before_both
            ),
        ),
    ),
    Group(
        "strict",
        checks.start_strictly,
        tuple(strictly(check) for check in (*map(checks.of_row, MANAGEMENT_ROWS), TOO_SLOW)),
    ),
    Group("strict-control", checks.start_closed_strictly, (strictly(CLOSED),)),
    Group(
        "urls",
        checks.start_with_urls,
        (Check("test_gRPC_allowed_urls.py", "allowed, other and relative URLs", checks.allowed_urls),),
    ),
    Group(
        "files",
        files.start_with_snapshots,
        (
            Check("test_metrics.py", "files of logs and metrics", files.logs_and_metrics),
            Check("test_snapshot.py", "at start, change and stop", files.snapshots),
            Check("test_snapshot.py", "start from a named one", files.start_from_a_snapshot),
            Check("test_snapshot.py", "start from the newest", files.start_from_the_newest),
            Check("test_snapshot.py", "none with --ncs", files.no_snapshots),
            Check("test_metrics.py", "LOG_LOCATION and METRICS_LOCATION", files.locations),
            Check("test_metrics.py", "odd lines in the file", files.odd_properties),
            Check("test_metrics.py", "metrics of a prediction", files.metrics_of_a_prediction),
        ),
    ),
    Group("handlers", handlers.start_handlers, handlers.CHECKS),
    Group(
        "kserve",
        partial(files.start_with_envelope, "kserve"),
        (Check("kf_inference_data.json", "predict", files.kserve_v1),),
    ),
    Group(
        "kservev2",
        partial(files.start_with_envelope, "kservev2"),
        (Check("kfv2_inference_data.json", "infer", files.kserve_v2),),
    ),
    Group(
        "workflows",
        files.start_for_workflows,
        (
            *(files.workflow_row(row) for row in files.WORKFLOW_ROWS[:4]),
            Check("workflow_inference_data.json", "predict", files.workflow_prediction),
            *(files.workflow_row(row) for row in files.WORKFLOW_ROWS[4:]),
            Check("workflow_data.json", "unregister", files.workflow_leaves),
        ),
    ),
)

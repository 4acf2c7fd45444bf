"""What comes along with `import gradlib`."""

import re
import subprocess
import sys

import gradlib


def test_matplotlib_is_imported_for_pictures_only() -> None:
    program = "import sys, gradlib; print('matplotlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_the_version_is_there_to_print() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", gradlib.__version__)


def test_the_names_that_never_change_are_there() -> None:
    fixed = """
        Call CoupledSamplesError DetachedPathError GradOutputsError GradlibError
        HookReport JacobianPlan Pass Recording TensorStats VJPExplanation
        explain_errors explain_vjp grad hook_report load_recording
        per_sample_jacobian per_sample_jacobian_from_graph plan_jacobian record
        tensor_stats
    """
    assert {*fixed.split()} <= {*gradlib.__all__}
    assert all(hasattr(gradlib, name) for name in gradlib.__all__)

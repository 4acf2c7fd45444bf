"""What comes along with `import gradlib`."""

import inspect
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


def test_every_result_prints_and_shows_in_a_notebook() -> None:
    classes = [
        it for it in map(vars(gradlib).get, gradlib.__all__) if inspect.isclass(it)
    ]
    results = {it for it in classes if not issubclass(it, Exception)}
    results -= {gradlib.NotSaved}  # it stands for a value, and is no result
    assert {it for it in results if not hasattr(it, "_repr_html_")} == set()
    plain = (object.__str__, object.__repr__)
    assert {it for it in results if (it.__str__, it.__repr__) == plain} == set()

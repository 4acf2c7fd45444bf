"""The tests of the documentation themselves, run on a small project of bad blocks."""

import os
import shutil
from pathlib import Path

import pytest

from mkdocs_hooks import fresh

from .snippets import ROOT, TORCH

PAGE = """# A page

```python
print("fine: vᵀJ")
#> fine: vᵀJ
```

!!! note

    ```python
    import torch

    print(torch.eye(2))
    #> old
    x = torch.zeros(2)
    print(x)
    ```

```python
def f(x):
    assert x == 2


f(1)
```

```python
x = 1
#> 3
```

```python {test="skip" reason="why not"}
raise SystemExit
```

```python
import os
import sys

print("past", file=sys.stderr)
```

```python
import warnings

warnings.warn("careful")
```

```python {figure="A line that rises"}
import builtins

import matplotlib.pyplot as plt
import numpy as np
import torch

builtins.left = True
torch.ones = torch.nn.left_behind = None
np.set_printoptions(precision=2)
figure, ax = plt.subplots()
ax.plot([1, 2])
torch.set_default_dtype(torch.float64)
torch.nn.modules.module.register_module_forward_hook(print)
with open("left.txt", "w") as file:
    file.write("left behind")
plt.show()
```

```python
import builtins
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

torch.nn.Identity()(1)
print(torch.ones(1).dtype, plt.get_fignums(), Path("left.txt").exists())
#> torch.float32 [] False
print(np.array([1 / 8]), hasattr(torch.nn, "left_behind"), hasattr(builtins, "left"))
#> [0.125] False False
```

```python
x = =
```
"""

RANDOM = """
```python
import torch

print(torch.rand(1))
```

```python {figure="Noise"}
import matplotlib.pyplot as plt
import torch

torch.manual_seed(0)
plt.plot(torch.rand(3))
```

```python {figure="Other noise each time"}
import matplotlib.pyplot as plt
import torch

plt.plot(torch.randn(3))
```
"""

MODULE = '''"""A package."""


def double(x):
    """Twice as much.

    ```python
    from gradlib import double

    print(double(2))
    #> 5
    ```
    """
    return 2 * x
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with these tests, a page and a module."""
    root = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "tests/docs", root / "tests/docs")
    for name, text in {
        "docs/page.md": PAGE,
        "docs/random.md": RANDOM,
        "gradlib/__init__.py": MODULE,
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def run(project: Path, *options: str) -> str:
    """The output of the block tests in the project."""
    # What these blocks print does not depend on the release of torch.
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-rA", "--runxfail"]
    finished = fresh.run(
        *command,
        "tests/docs/test_snippets.py",
        *options,
        folder=project,
        env={k: v for k, v in os.environ.items() if k != "CI"},  # there it says more
    )
    return finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def first_run(project: Path) -> str:
    """The output of the tests on the page as it was written."""
    return run(project)


def line_of(text: str) -> int:
    """The line of the page that holds a text, as an editor counts."""
    return PAGE[: PAGE.index(text)].count("\n") + 1


def block_with(text: str) -> str:
    """The name of the page's block that holds a text."""
    lines = enumerate(PAGE.split("\n"), start=1)
    fences = [number for number, line in lines if line.strip().startswith("```")]
    last = next(number for number in fences if number > line_of(text))
    return f"docs/page.md:{fences[fences.index(last) - 1]}-{last}"


def passed(output: str, test: str) -> bool:
    """Whether a test passed, as the summary says."""
    verdicts = [line for line in output.splitlines() if f"::{test}" in line]
    passes = [line for line in verdicts if line.startswith("PASSED")]
    fails = [line for line in verdicts if line.startswith("FAILED")]
    assert passes or fails, f"{test} did not run"
    return not fails


def test_the_run_goes_on_after_a_block_that_raises(first_run: str):
    assert "INTERNALERROR" not in first_run
    assert passed(first_run, f"test_runs_and_prints[{block_with('get_fignums')}]")


def test_a_skipped_block_says_why(first_run: str):
    assert "why not" in next(
        line for line in first_run.splitlines() if line.startswith("SKIPPED")
    )


def test_a_block_that_raises_is_named_by_its_lines(first_run: str):
    assert not passed(first_run, f"test_runs_and_prints[{block_with('f(1)')}]")
    assert f"docs/page.md:{line_of('f(1)')}: f(1)" in first_run
    assert f"docs/page.md:{line_of('assert x')}: assert x == 2" in first_run


def test_a_block_that_is_no_python_is_named_by_its_line(first_run: str):
    assert f"docs/page.md:{line_of('x = =')}: x = =" in first_run


def test_output_that_changed_is_shown(first_run: str):
    assert not passed(first_run, f"test_runs_and_prints[{block_with('#> old')}]")
    place = f"docs/page.md:{line_of('#> old')}"
    assert f"{place}: the #> lines are not what the block prints" in first_run
    assert "-#> old" in first_run
    assert "+#> tensor([[1., 0.],\n+#>         [0., 1.]])" in first_run


def test_output_that_no_print_made_fails(first_run: str):
    assert not passed(first_run, f"test_runs_and_prints[{block_with('#> 3')}]")


def test_what_goes_past_standard_output_fails(first_run: str):
    assert not passed(first_run, f"test_runs_and_prints[{block_with('import sys')}]")
    assert (
        f"{block_with('import sys')}: this reaches the terminal, but not" in first_run
    )


def test_a_warning_fails(first_run: str):
    assert not passed(first_run, f"test_runs_and_prints[{block_with('careful')}]")
    assert "UserWarning: careful" in first_run


def test_nothing_outlives_a_block(first_run: str, project: Path):
    assert passed(first_run, f"test_runs_and_prints[{block_with('left behind')}]")
    assert passed(first_run, f"test_runs_and_prints[{block_with('get_fignums')}]")
    assert not list(project.rglob("left.txt"))


def test_a_random_figure_fails(first_run: str):
    assert passed(first_run, "test_runs_and_prints[docs/random.md:8-14]")
    assert not passed(first_run, "test_runs_and_prints[docs/random.md:16-21]")
    assert "docs/random.md:16-21: this figure is another each time" in first_run


def test_a_block_is_linted(first_run: str):
    assert not passed(first_run, f"test_is_tidy[{block_with('import sys')}]")
    assert f"docs/page.md:{line_of('import os')}:8: F401" in first_run
    assert passed(first_run, f"test_is_tidy[{block_with('fine')}]")


def test_a_block_in_a_docstring_has_its_lines_in_the_module(first_run: str):
    test = "test_runs_and_prints[gradlib/__init__.py:7-12]"
    assert not passed(first_run, test)


def test_update_rewrites_and_is_then_stable(project: Path, tmp_path: Path):
    updated = tmp_path / "project"
    shutil.copytree(project, updated)
    page, module = updated / "docs/page.md", updated / "gradlib/__init__.py"

    output = run(updated, "--update-examples")
    assert (
        "blocks rewritten: 4, in docs/page.md, docs/random.md, gradlib/__in" in output
    )
    assert page.read_text(encoding="utf-8") == PAGE.replace(
        "    #> old\n", "    #> tensor([[1., 0.],\n    #>         [0., 1.]])\n"
    ).replace("    print(x)\n", "    print(x)\n    #> tensor([0., 0.])\n").replace(
        "#> 3\n", ""
    )
    assert module.read_text() == MODULE.replace("#> 5", "#> 4")

    # Only the block that draws other numbers each time, as it does for a reader.
    output = run(updated)
    assert output.count("the #> lines are not what the block prints") == 1
    assert not passed(output, "test_runs_and_prints[docs/random.md:2-7]")


def test_update_is_refused_under_xdist(project: Path):
    output = run(project, "--update-examples", "--numprocesses=2")
    assert "run it without -n" in output
    assert (project / "docs/page.md").read_text(encoding="utf-8") == PAGE


def test_the_pages_are_of_the_torch_that_make_installs() -> None:
    assert f"pip install --quiet torch=={TORCH}\n" in (ROOT / "Makefile").read_text()

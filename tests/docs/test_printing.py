"""Output stands, word for word, under the statement that made it."""

import contextlib
import textwrap
import threading
from pathlib import Path

import pytest

from .printing import Transcript, with_printed, without_printed


def printed_by(source: str, tmp_path: Path) -> str:
    source = textwrap.dedent(source).lstrip("\n")
    transcript = Transcript(tmp_path / "block.py")
    with contextlib.redirect_stdout(transcript):
        code = compile(source, str(tmp_path / "block.py"), "exec")
        exec(code, {"__name__": "__main__", "threading": threading})
    return with_printed(source, transcript.printed())


CASES = {
    "several rows, as the terminal shows them": """
        import torch
        print(torch.eye(2))
        #> tensor([[1., 0.],
        #>         [0., 1.]])
        """,
    "a blank line": """
        print("a\\n\\nb")
        #> a
        #>
        #> b
        """,
    "a loop, in the order of the terminal": """
        for i in range(2):
            print("a", i)
            print("b", i)
        #> a 0
        #> b 0
        #> a 1
        #> b 1
        """,
    "a function, below its caller": """
        def hook(text):
            print("hook", text)


        hook(1)
        #> hook 1
        hook(2)
        #> hook 2
        """,
    "bodies that run once": """
        with threading.Lock():
            print(
                "several"
                "lines"
            )
            #> severallines
        try:
            print("before")
            #> before
            raise ValueError
        except ValueError:
            print("caught")
            #> caught
        finally:
            if True:
                print("last")
                #> last
        """,
    "end, sep, file and what is no print": """
        import sys
        print("a", end="")
        print("b", "c", sep="-")
        #> ab-c
        print("d", file=sys.stdout)
        #> d
        sys.stdout.write("no line break")
        #> no line break
        """,
    "another thread": """
        thread = threading.Thread(target=print, args=["there"])
        thread.start(); thread.join()
        #> there
        """,
    "a mark inside a string": '''
        text = """
        #> no output
        """
        print(text)
        #>
        #> #> no output
        #>
        ''',
}


@pytest.mark.parametrize("source", CASES.values(), ids=CASES.keys())
def test_output_is_verbatim_and_in_place(source: str, tmp_path: Path):
    source = textwrap.dedent(source).lstrip("\n")
    assert printed_by(source, tmp_path) == source
    assert printed_by(without_printed(source), tmp_path) == source


@pytest.mark.parametrize(
    "stray",
    ["#> 1\nx = 1\n", "x = 1\n#> 1\n", "x = 1  #> 1\n", "print(1)\n#> 1\n#> 2\n"],
)
def test_a_mark_that_belongs_to_no_output_does_not_stay(stray: str, tmp_path: Path):
    assert printed_by(stray, tmp_path) in {"x = 1\n", "print(1)\n#> 1\n"}

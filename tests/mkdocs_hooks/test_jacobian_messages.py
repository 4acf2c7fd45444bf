"""What the search is told of the pages of errors of Jacobians."""

from types import SimpleNamespace
from typing import Any

import gradlib
from mkdocs_hooks import jacobian_messages
from mkdocs_hooks.cache import ROOT

TEXT = """# GL305: A title

```python
print(error)
    #> [GL305] It has shape
    #>   [], and three samples. More in
    #> gradlib's documentation: docs/errors/GL305.md
```

```python
print(1)
#> 1
```

```python
print(errors)
#> [GL305] One.
#> [GL305] Two.
#> [GL305] One.
```
"""


def tags(src_uri: str) -> Any:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=src_uri), meta={})
    jacobian_messages.on_page_markdown(TEXT, page=page)
    return page.meta.get("tags")


def test_the_tags_are_the_messages_without_their_end() -> None:
    assert tags("errors/GL305.md") == [
        "[GL305] It has shape [], and three samples.",
        "[GL305] One.",
        "[GL305] Two.",
    ]


def test_other_pages_keep_theirs() -> None:
    assert tags("errors/GL105.md") is None
    assert tags("errors/index.md") is None
    assert tags("questions/GL305.md") is None


def test_the_pages_show_messages() -> None:
    error = gradlib.IndependentOutputError
    text = (ROOT / f"docs/errors/{error.code}.md").read_text(encoding="utf-8")
    found = jacobian_messages.messages(text, error.code)
    assert any("autograd knows no way" in it for it in found)
    assert not any("documentation" in it for it in found)

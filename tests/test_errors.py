"""Every exception has a code of its own, and says it where readers look."""

import pytest

import gradlib
from gradlib.wording import with_article


def kinds() -> list[type[gradlib.GradlibError]]:
    public = [getattr(gradlib, name) for name in gradlib.__all__]
    errors = [kind for kind in public if isinstance(kind, type)]
    return [kind for kind in errors if issubclass(kind, gradlib.GradlibError)]


def test_codes_are_unique_and_documented() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(codes) == len(set(codes)) > 3
    for kind in set(kinds()) - {gradlib.GradlibError}:
        assert (kind.__doc__ or "").startswith(f"{kind.code}: ")


def test_the_message_carries_the_code() -> None:
    assert str(gradlib.NoSuchCallError("gone")) == "[GL201] gone"


def test_the_message_about_a_jacobian_ends_with_its_page() -> None:
    error = gradlib.CoupledSamplesError("They meet.")
    page = "docs/errors/GL301.md"
    assert str(error) == f"[GL301] They meet.\nMore in gradlib's documentation: {page}"


@pytest.mark.parametrize(
    "spoken",
    [
        "a Linear",
        "an Embedding",
        "an LSTM",
        "a GRU",
        "an RNN",
        "a UNet",
        "an Unflatten",
    ],
)
def test_an_article_follows_the_sound(spoken: str) -> None:
    assert with_article(spoken.split()[1]) == spoken

"""Say below every page which torch its outputs come from."""

from importlib.metadata import version

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> None:
    """Put the sentence where the theme shows the copyright."""
    release = version("torch").partition("+")[0]
    config.copyright = (
        f"Outputs on this page are of torch {release} on a CPU, where it names no other"
    )

"""Say below every page which torch its outputs are of."""

from importlib.metadata import version

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> None:
    """Put it where the theme shows who has the rights."""
    release = version("torch").partition("+")[0]
    config.copyright = (
        f"Outputs on this page are of torch {release} on a CPU, where it names no other"
    )

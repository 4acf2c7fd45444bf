"""Make the 404 page say where to go from there, and what it is in its title."""

from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig

BARE = "<h1>404 - Not found</h1>"
TITLE = "<title>{name}</title>"
HELP = """<h1>There is no such page</h1>
<p>It may have moved. Search for it above, for a message of torch too, or go on with</p>
<ul>
<li><a href="{home}">the questions</a> that are answered here,</li>
<li><a href="{home}errors/">the errors</a> by their codes,</li>
<li><a href="{home}guide/record-your-model/">the guide</a>, or</li>
<li><a href="{home}reference/recording/">the reference</a>.</li>
</ul>"""


def on_post_template(
    output_content: str, *, template_name: str, config: MkDocsConfig
) -> str:
    """Replace the theme's bare heading with the help.

    Raises:
        ValueError: This release of the theme has another heading there.
    """
    if template_name != "404.html":
        return output_content
    if BARE not in output_content:
        raise ValueError(f"404.html of the theme does not say {BARE}")
    # The page is shown at any wrong address, so relative links would not work.
    home = urlsplit(config.site_url or "/").path
    site = TITLE.format(name=config.site_name)
    titled = TITLE.format(name=f"No such page - {config.site_name}")
    helped = output_content.replace(BARE, HELP.format(home=home))
    return helped.replace(site, titled)

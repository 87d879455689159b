"""What mkdocs does to our pages beyond rendering them; ``hooks`` of mkdocs.yml names this file.

The home page is README.md, and CONTRIBUTING.md and CHANGELOG.md are pages too: they lie outside of ``docs/``, where
GitHub looks for them, so their links are turned round. Pictures go into the page itself instead of an ``<img>``, so
that they follow the reader's light or dark setting, which an image cannot see. The word behind a snippet's language
tells tests where it runs; mkdocs knows no such word, and would take the snippet for text and the text for a snippet.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FENCE = re.compile(r"^( *```\w+) \w+$", re.MULTILINE)  # with a word behind the language
IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*?pictures/(\w+\.svg)" */?>')


def on_files(files, config):
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for source, name in OUTSIDE.items():
        head = "---\nhide: [navigation]\n---\n" if name == "index.md" else ""
        files.append(File.generated(config, name, content=head + moved((ROOT / source).read_text())))
    return files


def moved(text):
    """Return Markdown of the repository's root as it reads in docs/."""
    for source, name in OUTSIDE.items():
        text = text.replace(f"]({source})", f"]({name})")
    return text.replace("](docs/", "](")


def on_page_markdown(markdown, **_):
    """Leave the language alone behind the fences of snippets."""
    return FENCE.sub(r"\1", markdown)


def on_page_content(html, page, **_):
    """Put every picture into the page; refuse a page whose fences mkdocs did not understand."""
    if "```" in html:
        raise ValueError(f"{page.file.src_uri}: a fence of a snippet is left as text.")
    return IMAGE.sub(lambda found: inlined(found[2], found[1]), html)


def inlined(name, words):
    svg = (ROOT / "docs/pictures" / name).read_text()
    svg = re.sub(
        r"<style>.*?</style>", "", svg[svg.index("<svg") :], count=1, flags=re.S
    )  # its colours are those of site.css here
    return svg.replace("<svg ", f'<svg class="picture" role="img" aria-label="{words}" ', 1)

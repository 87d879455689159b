"""An HTML page, read as a browser would."""

import html.parser


class Parsed(html.parser.HTMLParser):
    """Tags with their attributes, the text of table cells, and a check that tags are closed in order."""

    VOID = ("meta", "br", "wbr", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.cells, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open:
            self.cells[-1] += data

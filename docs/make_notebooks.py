"""The tutorials as executed notebooks: python docs/make_notebooks.py [NAME ...]

Each script of examples/ becomes docs/notebooks/NAME.ipynb: its functions one cell each, the body of
``main`` in steps, and what they print and draw.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
EXAMPLES, OUT = DOCS.parent / "examples", DOCS / "notebooks"
NAMES = ("tv_denoising", "sparse_coding", "nmf", "sinkhorn", "pagerank", "bratu")
NAMES += ("replace_residual_block", "certified_labels", "coming_from_torchdeq")


def cells(name: str) -> list[tuple[str, str]]:
    """The kind ("markdown" or "code") and the text of each cell."""
    code = (EXAMPLES / f"{name}.py").read_text("utf-8")
    tree, lines = ast.parse(code), code.splitlines()
    words = "# " + (ast.get_docstring(tree) or "").split("\n")[0].split(": python")[0]
    for part in (DOCS / "tutorials.md").read_text("utf-8").split("\n## ")[1:]:
        if f"a part of examples/{name}.py" in part:
            words = "# " + part.split("<!-- not run")[0].strip()
    place = f"Run it in `examples/` of a checkout; the same as a script is `examples/{name}.py`."
    found = [("markdown", f"{words}\n\n{place}")]
    *parts, main, _ = tree.body[1:]
    assert isinstance(main, ast.FunctionDef)
    setup = "\n".join(
        ast.get_source_segment(code, node) or ""
        for node in parts
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
    )
    setup = re.sub(r"^(import argparse|from __future__ .*)\n", "", setup, flags=re.MULTILINE)
    setup = setup.replace("Path(__file__)", f'Path("../examples/{name}.py").resolve()')
    found.append(("code", setup))
    rest = [n for n in parts if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    found += [("code", ast.get_source_segment(code, node) or "") for node in rest]
    spec = main.args
    given = dict(zip([a.arg for a in spec.args][::-1], spec.defaults[::-1], strict=False))
    step = ["quick = False"] if spec.args and spec.args[0].arg == "quick" else []
    step += [f"{key} = {ast.unparse(value)}" for key, value in reversed(given.items())]
    for node, after in zip(main.body, [*main.body[1:], None], strict=True):
        first, last = node.lineno - 1, (node.end_lineno or 0)
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            first = node.decorator_list[0].lineno - 1
        text = [line[4:] for line in lines[first:last]]
        if text[0].startswith("figure.savefig(out"):  # a notebook shows it
            continue
        above = lines[first - 1].strip()
        if above.startswith("#") or (not above and step) or "plt.subplots" in text[0]:
            found.append(("code", "\n".join(step)))
            step = [above] if above.startswith("#") else []
        step += [re.sub("^return ", "", line) if after is None else line for line in text]
    return [*found, ("code", "\n".join(step))]


def make(name: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    book = nbformat.v4.new_notebook(cells=[new[kind](text) for kind, text in cells(name)])
    for number, cell in enumerate(book.cells):
        cell["id"] = f"{name}-{number}"
    client = NotebookClient(book, timeout=1200, record_timing=False)
    client.execute(cwd=str(EXAMPLES))
    nbformat.write(book, OUT / f"{name}.ipynb")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        make(name)

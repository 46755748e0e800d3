"""``python -m website.build``: the documentation site in build/site, from docs/ and the docstrings.

On GitHub, pages link to examples and sources by relative paths. The site has only docs/, so that the pages are copied
to build/pages with these links pointed to the repository. Zensical then builds strictly: a broken link is an error.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = "docs"
PAGES = ROOT / "build" / "pages"
LOOKS = ("dashboard/server/icon.svg", "website/site.css")
BRANCH = "main"
_FENCED_BLOCK = re.compile(r"^(`{3,})\w*\n.*?^\1$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def main() -> int:
    """Exit status of Zensical; 1 where a link leads to no file of the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / DOCS, PAGES)
    for file in LOOKS:
        shutil.copy(ROOT / file, PAGES)
    repository = repository_url()
    for page in PAGES.rglob("*.md"):
        name = page.relative_to(PAGES).as_posix()
        try:
            text = point_to_repository(page.read_text(encoding="utf-8"), name, repository)
        except ValueError as error:
            sys.stderr.write(f"website: {error}\n")
            return 1
        page.write_text(text, encoding="utf-8")
    # The cache keeps pages by their text: a page of the API depends on docstrings, too.
    return subprocess.call([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT)


def repository_url() -> str:
    """Address of the repository that GitHub's workflow runs in; elsewhere the placeholder of the recipes for CI."""
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    return f"{server}/{os.environ.get('GITHUB_REPOSITORY', 'OWNER/tracekit')}"


def point_to_repository(text: str, page: str, repository: str) -> str:
    """Text of a page in docs/ whose links to files outside docs/ lead to the repository, blocks of code unchanged.

    Raises ValueError if such a file does not exist.
    """
    blocks = list(_FENCED_BLOCK.finditer(text))
    starts = [0, *(block.end() for block in blocks)]
    ends = [*(block.start() for block in blocks), len(text)]
    codes = [*(block[0] for block in blocks), ""]
    return "".join(
        _LINK.sub(lambda link: repository_link(page, link[0], repository), text[start:end]) + code
        for start, end, code in zip(starts, ends, codes, strict=True)
    )


def repository_link(page: str, target: str, repository: str) -> str:
    """Link of a page in docs/, to the repository where it leaves docs/; raises ValueError if no such file exists.

    >>> repository_link("lab/README.md", "../../README.md#more", "https://github.com/OWNER/tracekit")
    'https://github.com/OWNER/tracekit/blob/main/README.md#more'
    >>> repository_link("lab/README.md", "../query.md", "https://github.com/OWNER/tracekit")
    '../query.md'
    """
    path, mark, heading = target.partition("#")
    place = posixpath.normpath(posixpath.join(DOCS, posixpath.dirname(page), path))
    if "://" in target or not path or place.partition("/")[0] == DOCS:
        return target
    if not (ROOT / place).exists():
        raise ValueError(f"docs/{page}: the link {target} leads to no file of the repository; correct the link")
    kind = "tree" if (ROOT / place).is_dir() else "blob"
    return f"{repository}/{kind}/{BRANCH}/{place}{mark}{heading}"


if __name__ == "__main__":
    sys.exit(main())

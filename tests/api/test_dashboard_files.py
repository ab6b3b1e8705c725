"""The dashboard's files: only those, of the right type, and nothing of them leads anywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import RunningServer

FOLDER = Path(__file__).parents[2] / "api" / "dashboard"


def test_every_file_that_the_page_names_is_served(server: RunningServer) -> None:
    page = server.client.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    named = set(re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page.text))
    todo, seen = list(named), set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        response = server.client.get(path)
        assert response.status_code == 200, path
        assert response.headers["x-content-type-options"] == "nosniff"
        folder = path.rpartition("/")[0]
        if path.endswith(".js"):
            assert response.headers["content-type"].startswith("text/javascript")
            todo += [f"{folder}/{name}" for name in re.findall(r'from "\./([^"]+)"', response.text)]
        if path.endswith(".css"):
            todo += [f"{folder}/{name}" for name in re.findall(r'@import "\./?([^"]+)"', response.text)]
    scripts = {f"/dashboard/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.js")}
    assert scripts <= seen, "scripts that no page asks for"


def test_no_file_of_the_page_names_another_host() -> None:
    """But the names of XML, which nobody fetches. In a browser, what the libraries ask for is looked at too."""
    for path in FOLDER.glob("*"):
        if path.suffix in (".html", ".css", ".js"):
            hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}", path.read_text()))
            assert hosts <= {"http://www.w3.org"}, f"{path}: {hosts}"


@pytest.mark.parametrize(
    "name",
    ["nope.js", "../app.py", "..%2fapp.py", "%2e%2e/auth.py", "__init__.py", "vendor", "vendor/", "/etc/passwd"],
)
def test_nothing_else_is(server: RunningServer, name: str) -> None:
    assert server.client.get(f"/dashboard/{name}").status_code == 404


def test_other_ways_to_the_page(server: RunningServer) -> None:
    assert server.client.get("/dashboard/").text == server.client.get("/dashboard").text
    response = server.client.get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/dashboard")


def test_a_browser_that_has_a_file_is_told_so(server: RunningServer) -> None:
    first = server.client.get("/dashboard")
    again = server.client.get("/dashboard", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")

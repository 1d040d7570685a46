"""`/docs`: the description of the calls as one page of plain HTML, without scripts and without anything from elsewhere.

The policy lets the page load nothing; its one style stands in it and is named there by its hash.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any, Final

Json = dict[str, Any]

STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "section{border-top:1px solid #ccc;margin-top:1.5rem}"
    "code,pre{font-family:ui-monospace,monospace;font-size:.875rem}"
    "pre{background:#f5f5f5;padding:.75rem;overflow-x:auto}"
    "table{border-collapse:collapse}"
    "td,th{text-align:left;vertical-align:top;padding:.125rem 1rem .125rem 0}"
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode("ascii")

HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def render(document: Json) -> bytes:
    """The page of an OpenAPI document."""
    info = document["info"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        '<meta name=viewport content="width=device-width">',
        f"<style>{STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['summary'])}. The same for programs: <a href=/openapi.json>/openapi.json</a>.",
        "<ul>",
        *(_link(method, path, operation) for method, path, operation in operations),
        "</ul>",
        *(_call(method, path, operation) for method, path, operation in operations),
        "<section><h2>Documents</h2>",
        *(_schema(name, schemas[name]) for name in sorted(schemas)),
        "</section></html>",
    ]
    return "\n".join(parts).encode()


def _link(method: str, path: str, operation: Json) -> str:
    return f'<li><a href="#{escape(operation["operationId"])}"><code>{method} {escape(path)}</code></a>'


def _call(method: str, path: str, operation: Json) -> str:
    roles = [role for requirement in operation.get("security", []) for role in requirement["credential"]]
    anchor = escape(operation["operationId"])
    return "\n".join(
        [
            f'<section id="{anchor}"><h2><code>{method} {escape(path)}</code></h2>',
            f"<p>{escape(operation['summary'])}",
            f"<p>For: {escape(', '.join(roles) or 'anyone')}.",
            "<table>",
            *_parameters(operation.get("parameters", [])),
            *_bodies("body", operation.get("requestBody", {})),
            *_responses(operation["responses"]),
            "</table></section>",
        ]
    )


def _parameters(parameters: list[Json]) -> Iterator[str]:
    for parameter in parameters:
        rule = {name: value for name, value in parameter["schema"].items() if name != "type"}
        yield _row(f"{parameter['in']} {parameter['name']}", _code(rule))


def _responses(responses: Json) -> Iterator[str]:
    for status, response in responses.items():
        if status < "400":
            yield from _bodies(status, response)
        else:
            yield _row(status, escape(response["description"].replace("`", "")))


def _bodies(what: str, holder: Json) -> Iterator[str]:
    for media_type, content in holder.get("content", {}).items():
        schema = content["schema"]
        forms = [_link_to(form["$ref"]) for form in schema.get("anyOf", [schema]) if "$ref" in form]
        form = " or ".join(forms) or escape(schema.get("description", ""))
        yield _row(what, f"<code>{escape(media_type)}</code> {form}")
    if holder and not holder.get("content"):
        yield _row(what, "no body")


def _link_to(reference: str) -> str:
    name = escape(reference.rpartition("/")[2])
    return f'<a href="#{name}">{name}</a>'


def _row(head: str, cell: str) -> str:
    return f"<tr><th>{escape(head)}<td>{cell}"


def _schema(name: str, schema: Json) -> str:
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{escape(json.dumps(schema, indent=2))}</pre>'


def _code(value: Json) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"

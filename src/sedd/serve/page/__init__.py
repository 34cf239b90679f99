"""The page at `/`: plain files without a build step, which use the HTTP interface as any other client does."""

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent
MEDIA = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The files that are served, by suffix; named here because systems disagree about some of the types."""


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/page`."""
    files = {path.name: path for path in FOLDER.iterdir() if path.suffix in MEDIA}

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> FileResponse:
        if name not in files:
            raise HTTPException(404)
        return FileResponse(files[name], media_type=MEDIA[files[name].suffix])

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return await page_file("index.html")

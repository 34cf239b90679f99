"""Draw the figures of the documentation with the package's processes, schedules, exact scores, samplers and networks.

python experiments/pictures.py              writes docs/images/, all pictures of the documentation
python experiments/pictures.py --only NAME  writes one figure
python experiments/pictures.py --record texts trace runs demos --book book.txt
                                            computes anew what is stored in experiments/results, or the parts named:
                                            texts (of the moving picture and the infilling) and trace, by the model
                                            stories; runs, trained on a book; demos, which train small networks
python experiments/pictures.py --check      names the figures that show other data, and then ends with code 1

Every figure is drawn from data that are computed here or stored, and holds their digest: other data make it stale.
Those of the results page are drawn too. Screenshots need Chromium; without it they are left as they are.
"""

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path

import results_page
from figures import animation, concepts, diagrams, guides, introduction, screenshots
from figures.canvas import Picture
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin
from study_runs import digest, save_figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
FORMATS = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp", ".avif")
FIGURES: Mapping[str, Picture] = {
    **introduction.PICTURES,
    **concepts.PICTURES,
    **diagrams.PICTURES,
    **animation.PICTURES,
    **guides.PICTURES,
    **screenshots.PICTURES,
    **guides.SCREENSHOTS,
}
PHOTOGRAPHED = (*screenshots.PICTURES, *guides.SCREENSHOTS)
RASTER = (*guides.PICTURES, *PHOTOGRAPHED)
PARTS = ("texts", *guides.PARTS)


def path_of(name: str) -> Path:
    """Return the file of a figure."""
    return IMAGES / f"{name}.{'png' if name in RASTER else 'svg'}"


def stored_digest(file: Path) -> str | None:
    """Return the digest of the data that a figure was drawn from; None if there is no file."""
    if not file.exists():
        return None
    if file.suffix == ".png":
        with Image.open(file) as image:
            return str(image.info.get("Identifier"))
    _, _, rest = file.read_text(encoding="utf-8").partition("<dc:identifier>")
    return rest.partition("<")[0]


def stale() -> list[str]:
    """Return the figures whose data are not today's."""
    found = {path_of(name): picture.data() for name, picture in FIGURES.items()}
    found |= {path_of(drawing.name): drawing.data for drawing in results_drawings()}
    return [
        f"{file.name} shows other data; run make pictures"
        for file, data in found.items()
        if stored_digest(file) != digest(data)
    ]


def unknown() -> list[str]:
    """Return the pictures below docs/ that nothing here draws."""
    drawn = {path_of(name) for name in (*FIGURES, *(drawing.name for drawing in results_drawings()))}
    files = {file for file in IMAGES.parent.rglob("*") if file.suffix.lower() in FORMATS}
    return [f"{file.relative_to(ROOT)} is drawn by no code; add it to FIGURES or delete it"
            for file in sorted(files - drawn)]  # fmt: skip


def results_drawings() -> list[results_page.Drawing]:
    """Return the figures of the results page."""
    return [drawing for section in results_page.sections(ROOT) for drawing in section.drawings]


def write(name: str) -> None:
    """Draw one figure."""
    picture, file = FIGURES[name], path_of(name)
    drawn = picture.draw()
    if isinstance(drawn, Figure):
        save_figure(drawn, file, picture.data())
    elif isinstance(drawn, str):
        file.write_text(drawn.replace("DIGEST", digest(picture.data())), encoding="utf-8")
    else:
        facts = PngImagePlugin.PngInfo()
        facts.add_text("Identifier", digest(picture.data()))
        with Image.open(io.BytesIO(drawn)) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True, pnginfo=facts)


def write_all() -> None:
    """Draw everything."""
    for name in FIGURES:
        if name in PHOTOGRAPHED and (reason := screenshots.missing()):
            print(f"{path_of(name).name} is left as it is: {reason}", file=sys.stderr)
        else:
            write(name)
    for drawing in results_drawings():
        save_figure(drawing.draw(), path_of(drawing.name), drawing.data)


def main() -> None:
    """Draw everything, or name what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(FIGURES), metavar="NAME", help="draw this figure alone")
    parser.add_argument("--record", nargs="+", choices=PARTS, metavar="PART", help=f"compute anew: {', '.join(PARTS)}")
    parser.add_argument("--book", type=Path, help="text of about a megabyte that runs are trained on")
    parser.add_argument("--check", action="store_true", help="write nothing; end with code 1 if one is stale")
    args = parser.parse_args()
    if args.check:
        if problems := stale() + unknown():
            print("\n".join(problems), file=sys.stderr)
            raise SystemExit(1)
        return
    for part in args.record or ():
        if part == "texts":
            animation.record()
        else:
            guides.record(part, args.book)
    if args.only:
        write(args.only)
    else:
        write_all()


if __name__ == "__main__":
    main()

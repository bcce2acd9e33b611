"""Writes the tables of the README that are printed from code: `make readme`."""

from pathlib import Path

from knowgate.gates import markdown_table

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- gates -->", "<!-- /gates -->"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{START}\n{markdown_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

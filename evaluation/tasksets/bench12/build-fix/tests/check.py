"""The agent's Makefile must build an untouched copy of the project, in every situation of the instruction."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402

from grading import TESTS, main, need, read, require, run  # noqa: E402

ERROR = "# Broken\n\nfirst\n!error\nlast\n"


class Project:
    """A fresh copy of the project with the agent's Makefile."""

    def __init__(self, folder, makefile):
        self.root = Path(folder) / "handbook"
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(TESTS / "handbook", self.root)
        (self.root / "Makefile").write_text(makefile)
        self.age()

    def age(self):
        """Everything there is now is older than whatever is written later."""
        for path in self.root.rglob("*"):
            old = path.stat().st_mtime - 100
            os.utime(path, (old, old))

    def make(self, *words, fails=False):
        output, status = run("make", *words, cwd=self.root)
        wanted = "fail" if fails else "succeed"
        require((status != 0) == fails, f"make {' '.join(words)} does not {wanted}: {output.strip()[-300:]}")

    def write(self, name, text):
        (self.root / name).write_text(text)

    def built(self, message):
        """All that must be there, computed by the tools themselves."""
        names = (self.root / "ORDER").read_text().split()
        for name in names:
            page, _ = run(
                *("awk", "-f", "tools/render.awk", "-v", f"title={name}", "common/header.inc", f"chapters/{name}.txt"),
                cwd=self.root,
            )
            self.holds(f"build/{name}.html", page, message)
        text, _ = run("sh", "tools/join.sh", *(f"build/{name}.html" for name in names), cwd=self.root)
        self.holds("dist/handbook.txt", text, message)
        sums, _ = run("sha256sum", "handbook.txt", cwd=self.root / "dist")
        self.holds("dist/SUMS", sums, message)
        output, status = run("make", "-q", cwd=self.root)
        require(status == 0, f"{message}: make has something to do right after a build: {output.strip()[-300:]}")

    def holds(self, name, content, message):
        path = self.root / name
        require(path.is_file() and read(path) == content, f"{message}: {name} is missing or out of date")


def check():
    need("make", "awk", "sed", "sha256sum")
    makefile = read("/app/handbook/Makefile")
    with tempfile.TemporaryDirectory() as folder:
        for words in ((), ("-j4",)):
            project = Project(folder, makefile)
            project.make(*words)
            project.built(f"make {' '.join(words)}".strip())
            project.make(*words)
            project.built("make a second time")
        changes(Project(folder, makefile))
        failures(Project(folder, makefile))
        cleaning(Project(folder, makefile))


def changes(project):
    project.make()
    for name in ("common/header.inc", "tools/render.awk", "tools/join.sh", "chapters/safety.txt", "ORDER"):
        project.age()
        text = (project.root / name).read_text()
        lines = text.splitlines(keepends=True)
        changed = {
            "common/header.inc": "<!-- new -->\n" + text,
            "tools/render.awk": text.replace("<h1>", "<h1 class=top>"),
            "tools/join.sh": text.replace("%4d", "%5d"),
            "chapters/safety.txt": text + "No running.\n",
            "ORDER": "".join(reversed(lines)),
        }[name]
        others = {page: page.stat().st_mtime_ns for page in (project.root / "build").glob("*.html")}
        project.write(name, changed)
        project.make("-j4")
        project.built(f"after a change of {name}")
        if name == "chapters/safety.txt":
            again = [page.name for page, time in others.items() if page.stat().st_mtime_ns != time]
            require(again == ["safety.html"], f"a change of safety.txt made {sorted(again)} again")
    project.age()
    project.write("chapters/night.txt", "# Night\n\nLights on.\n")
    project.write("ORDER", "night\n" + (project.root / "ORDER").read_text())
    project.make()
    project.built("after a chapter was added")
    project.age()
    project.write("dist/handbook.txt", "")
    (project.root / "dist/handbook.txt").unlink()
    project.make()
    project.built("after the text was removed")


def failures(project):
    project.write("chapters/loading.txt", ERROR)
    project.make("-k", fails=True)
    for name in ("build/loading.html", "dist/handbook.txt", "dist/SUMS"):
        require(not (project.root / name).exists(), f"{name} is left behind by a build that failed")
    project.write("chapters/loading.txt", "# Loading\n\nSlowly.\n")
    project.make()
    project.built("after the mistake was corrected")


def cleaning(project):
    project.make("clean")
    for name in ("all", "clean", "check"):
        project.write(name, "")
    project.make()
    project.built("with files called all, clean and check")
    shutil.rmtree(project.root / "build")
    project.make("clean")
    require(not (project.root / "dist").exists(), "make clean leaves dist")
    project.make("check")
    project.built("make check")
    project.age()
    project.write("dist/handbook.txt", "another text\n")
    newer = (project.root / "dist/handbook.txt").stat().st_mtime + 10
    os.utime(project.root / "dist/SUMS", (newer, newer))
    project.make("check", fails=True)
    project.make("clean")
    project.make("clean")
    left = [name for name in ("build", "dist") if (project.root / name).exists()]
    require(not left, f"make clean leaves {left}")


main(check)

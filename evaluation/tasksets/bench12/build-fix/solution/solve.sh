#!/bin/bash
set -euo pipefail
cd /app/handbook
make || true
cat > Makefile <<'MAKE'
# Builds the handbook: pages in build/, the joined text in dist/.
CHAPTERS := $(shell cat ORDER)
PAGES := $(CHAPTERS:%=build/%.html)

.PHONY: all clean check
.DELETE_ON_ERROR:

all: dist/handbook.txt dist/SUMS

build dist:
	mkdir -p $@

build/%.html: chapters/%.txt common/header.inc tools/render.awk | build
	awk -f tools/render.awk -v title=$* common/header.inc $< > $@

dist/handbook.txt: $(PAGES) tools/join.sh ORDER | dist
	sh tools/join.sh $(PAGES) > $@

dist/SUMS: dist/handbook.txt
	cd dist && sha256sum handbook.txt > SUMS

check: dist/SUMS
	cd dist && sha256sum -c SUMS

clean:
	rm -rf build dist
MAKE
make -j4
make check
make clean

#!/bin/bash
set -euo pipefail
cd /app
cat > booking.py <<'PYTHON'
"""Room bookings; the rules are in SPEC.md."""

import re

DAY = 1440


def overlaps(a, b):
    return max(a[0], b[0]) < min(a[1], b[1])


def merge(ranges):
    joined = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def free(day, booked):
    gaps = []
    at = day[0]
    for start, end in merge(booked):
        if min(start, day[1]) > at:
            gaps.append((at, min(start, day[1])))
        at = max(at, end)
    if at < day[1]:
        gaps.append((at, day[1]))
    return gaps


def parse(text):
    parts = text.split("-")
    if len(parts) != 2:
        raise ValueError(f"no range: {text!r}")
    start, end = minutes(parts[0]), minutes(parts[1])
    if start == DAY:
        raise ValueError(f"no start: {text!r}")
    return (start, end if end > start else end + DAY)


def minutes(text):
    found = re.fullmatch(r"(\d\d):(\d\d)", text.strip())
    if found is None:
        raise ValueError(f"no time: {text!r}")
    hour, minute = int(found[1]), int(found[2])
    if minute > 59 or hour * 60 + minute > DAY:
        raise ValueError(f"no time: {text!r}")
    return hour * 60 + minute


def price(booked, rate):
    total = 0  # in cents * 60 * 10
    for minute in range(booked[0], booked[1]):
        share = 5 if minute % DAY < 360 or minute % DAY >= 1320 else 10
        total += rate * share * (8 if minute - booked[0] >= 480 else 10)
    return (total + 3000) // 6000
PYTHON
python3 -B -m unittest -q

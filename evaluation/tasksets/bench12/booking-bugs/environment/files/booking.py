"""Room bookings; the rules are in SPEC.md."""

DAY = 1440


def overlaps(a, b):
    return a[0] <= b[1] and b[0] <= a[1]


def merge(ranges):
    ranges.sort()
    joined = []
    for start, end in ranges:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def free(day, booked):
    gaps = []
    at = day[0]
    for start, end in booked:
        if start > at:
            gaps.append((at, start))
        at = end
    if at < day[1]:
        gaps.append((at, day[1]))
    return gaps


def parse(text):
    start, end = text.split("-")
    start, end = minutes(start), minutes(end)
    if end < start:
        end += DAY
    return (start, end)


def minutes(text):
    hour, minute = text.split(":")
    if int(hour) > 24 or int(minute) > 60:
        raise ValueError(f"no time: {text!r}")
    return int(hour) * 60 + int(minute)


def price(booked, rate):
    total = 0
    for minute in range(booked[0], booked[1]):
        cents = rate // 60
        if minute < 360 or minute > 1320:
            cents = cents / 2
        if minute - booked[0] > 480:
            cents = cents * 0.8
        total += cents
    return round(total)

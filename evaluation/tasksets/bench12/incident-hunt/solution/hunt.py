"""Follows each complaint through the five logs."""

import re
from pathlib import Path

LOGS = Path("/app/logs")


def log(name):
    return (LOGS / f"{name}.log").read_text()


sessions = {}
for mail, session in re.findall(r"login ok mail=(\S+) .* session=sess-(\S+)", log("auth")):
    sessions.setdefault(mail, set()).add(session)
traces = {}
for session, trace in re.findall(r"POST /v2/order .* s=(\S+) tr=(\S+)", log("gateway")):
    traces.setdefault(session, []).append(trace)
orders = {
    trace: (int(second), order)
    for second, trace, order in re.findall(r"\[(\d+)s\] accept trace:(\S+) -> order (\d+)", log("orders"))
}
batches = dict(re.findall(r"order=(\d+) .* queued in (B\d+)", log("billing")))
follows = dict(re.findall(r"(B\d+) (?:superseded by|abandoned, contents now) (B\d+)", log("billing")))
follows.update((old, new) for new, old in re.findall(r"(B\d+) takes over from (B\d+)", log("billing")))
extents = {
    batch: extent
    for extent, stored in re.findall(r"flush (x\S+) to \S+: (\S+)", log("storage"))
    for batch in stored.split("+")
}
damage = {
    extent: (volume, sector)
    for volume, extent, sector in re.findall(r"scrub (\S+): checksum mismatch (x\S+) sector (\d+)$", log("storage"), re.M)
}

with open("/app/incidents.csv", "w") as out:
    print("number,order,batch,extent,volume,sector", file=out)
    for number, mail, hour, minute in re.findall(
        r"^(\d+)\. (\S+): my order of (\d+):(\d+)", Path("/app/complaints.txt").read_text(), re.M
    ):
        told = int(hour) * 3600 + int(minute) * 60
        made = [orders[trace] for session in sessions[mail] for trace in traces.get(session, [])]
        _, order = min(made, key=lambda one: abs(one[0] - told))
        batch = batches[order]
        while batch in follows:
            batch = follows[batch]
        volume, sector = damage[extents[batch]]
        print(number, order, batch, extents[batch], volume, sector, sep=",", file=out)

"""Makes a picture of a recording for PyTorch's memory_viz (docs/RECORDING.md).

    python3 memory_viz.py arena.jsonl arena.pickle

The page of that name, or PyTorch's _memory_viz.py, shows the last state and how it came about. Each
range of committed memory is a segment there, as with expandable segments. A block is free from when
its owner freed it: a recording does not tell when the device ends its last work on it.
"""

import json
import pickle
import sys


class Picture:
    def __init__(self, first):
        self.granule = first["granule"]
        self.epoch_ns = first["unix_ns"] - first["time_ns"]
        self.frames = [{"filename": first["arena"], "line": 0, "name": first["backend"]}]
        self.backed, self.live, self.trace = set(), {}, []

    def add(self, event):
        name, address = event["event"], event.get("address")
        size, to = event.get("size"), event.get("to")
        if name in ("free", "resize", "move"):
            self.note(event, "free_requested", address, self.live[address])
            self.note(event, "free_completed", address, self.live.pop(address))
        if name in ("alloc", "resize", "move"):
            address = to if name == "move" else address
            self.live[address] = size
            self.note(event, "alloc", address, size)
        if name in ("decommit", "remap"):
            self.backed.difference_update(range(address, address + size, self.granule))
            self.note(event, "segment_unmap", address, size)
        if name in ("commit", "remap"):
            address = to if name == "remap" else address
            self.backed.update(range(address, address + size, self.granule))
            self.note(event, "segment_map", address, size)
        if name == "alloc_failed" and event["why"] in ("limit", "device"):
            free = event.get("headroom", 0)
            self.note(event, "oom", 0, event["bytes"], device_free=free)

    def note(self, event, action, address, size, **more):
        time_us = (self.epoch_ns + event["time_ns"]) // 1000
        entry = {"action": action, "addr": address, "size": size, "time_us": time_us}
        self.trace.append({**entry, "stream": 0, "frames": self.frames, **more})

    def snapshot(self):
        runs = []
        for at in sorted(self.backed):
            if runs and runs[-1][1] == at:
                runs[-1][1] += self.granule
            else:
                runs.append([at, at + self.granule])
        blocks = sorted(self.live.items())
        return {
            "segments": [self.segment(start, end, blocks) for start, end in runs],
            "device_traces": [self.trace],
        }

    def segment(self, start, end, blocks):
        tiles, at = [], start
        for block, size in [b for b in blocks if start <= b[0] and b[0] + b[1] <= end] + [(end, 0)]:
            if at < block:
                tiles.append(self.tile(at, block - at, "inactive"))
            if size:
                tiles.append(self.tile(block, size, "active_allocated"))
            at = block + size
        taken = sum(tile["size"] for tile in tiles if tile["state"] != "inactive")
        sizes = {"allocated_size": taken, "active_size": taken, "requested_size": taken}
        place = {"device": 0, "address": start, "total_size": end - start, "stream": 0}
        kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True}
        return {**place, **sizes, **kind, "frames": self.frames, "blocks": tiles}

    def tile(self, at, size, state):
        tile = {"address": at, "size": size, "requested_size": size, "state": state}
        return {**tile, "frames": self.frames}


def main(recording, pickled):
    with open(recording, encoding="utf-8") as lines:
        picture = Picture(json.loads(next(lines)))
        for line in lines:
            picture.add(json.loads(line))
    with open(pickled, "wb") as to:
        pickle.dump(picture.snapshot(), to)


main(*sys.argv[1:])

"""Whether Grafana's published schema knows every key of the dashboards.

Each file is read into the types of grafana-foundation-sdk and written again: what the types do not
know is lost on the way, and that is mostly a key that is misspelt. Annotations keep what the
Prometheus data source itself reads, which the schema leaves open: those keys are named here.

    keys.py FILE...    prints `figure dashboard.keys_lost`; fails if one is lost
"""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

# Keys of the Prometheus data source's annotations.
OPEN = {"textFormat", "titleFormat", "useValueForTime"}


def lost(before, after, path=""):
    """The paths of keys that stand before and not after."""
    if isinstance(before, dict):
        for key, value in before.items():
            here = f"{path}/{key}"
            if not isinstance(after, dict) or key not in after:
                # A null and an empty list may be left out: they say nothing.
                if value not in (None, [], {}, "", False):
                    yield here
            else:
                yield from lost(value, after[key], here)
    elif isinstance(before, list):
        for at, value in enumerate(before):
            inner = after[at] if isinstance(after, list) and at < len(after) else None
            yield from lost(value, inner, f"{path}/{at}")


def main(files):
    register_default_plugins()
    count = 0
    for file in files:
        with open(file, encoding="utf-8") as text:
            before = json.load(text)
        after = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(before)))
        for path in lost(before, after):
            if path.startswith("/annotations/list/") and path.rsplit("/", 1)[1] in OPEN:
                continue
            count += 1
            print(f"{file}: {path} is lost")
    print(f"figure dashboard.keys_lost {count} count")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes golden/messages.json. A change of it is a change of the protocol."""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
golden = importlib.import_module("tests.unit.messages.test_golden")

if __name__ == "__main__":
    messages = {name: golden.encode(m) for name, m in sorted(golden.all_messages().items())}
    document = {"protocol_version": golden.PROTOCOL_VERSION, "messages": messages}
    golden.FILE.write_text(json.dumps(document, indent=1) + "\n")

"""One HTTP request from wherever this script runs: ``python post_json.py URL``, body on stdin.

Prints a JSON object of ``status``, ``request_id`` and ``body``; an empty stdin makes it a GET. The
standard library alone, so that it starts at once.
"""

import http.client
import json
import sys
from urllib.parse import urlsplit

ANSWER_SECONDS = 180.0


def main(url: str) -> None:
    """Ask and print."""
    parts = urlsplit(url)
    body = sys.stdin.read()
    connection = http.client.HTTPConnection(parts.netloc, timeout=ANSWER_SECONDS)
    headers = {"Content-Type": "application/json"} if body else {}
    connection.request("POST" if body else "GET", parts.path, body or None, headers)
    response = connection.getresponse()
    told = {
        "status": response.status,
        "request_id": response.getheader("x-request-id", ""),
        "body": json.loads(response.read()),
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

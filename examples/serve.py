"""Serve an exported ensemble over HTTP, with requests that arrive together answered as one batch.

    python examples/serve.py                                     train on digits, export, serve, send requests, stop
    python examples/serve.py --file digits.plurax --port 8000    serve a file that `plurax.ensemble.export` wrote

    curl -s localhost:8000/predict -d '{"rows": [[0, 0, 0.3, ...]]}'

The server imports JAX and flatbuffers, but neither Flax nor the code of the models. A request waits at most `--wait`
milliseconds for others. Batches are filled up to a power of two, so that few programs are compiled, and all of these
are compiled before the first request.
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from plurax.transforms.program import load_exported


class Batcher:
    """Answers requests of one row each in batches, in a thread of its own.

    Args:
      predict: a function of rows (batch, features) that returns a dict of arrays with the rows along axis 0.
      features: the number of features.
      most: the most rows in a batch, a power of two.
      wait: the seconds that a request waits for others.
    """

    def __init__(self, predict: Any, features: int, most: int, wait: float) -> None:
        self._predict, self._most, self._wait = predict, most, wait
        self._waiting: queue.Queue[tuple[np.ndarray, Future[Any]]] = queue.Queue()
        self.batches, self.rows = 0, 0
        size = 1
        while size <= most:  # compiled before the first request
            predict(np.zeros((size, features), np.float32))
            size *= 2
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, row: np.ndarray) -> Future[Any]:
        """Return the future answer to one row: a dict of arrays."""
        answer: Future[Any] = Future()
        self._waiting.put((row, answer))
        return answer

    def _run(self) -> None:
        while True:
            taken = [self._waiting.get()]
            until = time.monotonic() + self._wait
            while len(taken) < self._most:
                try:
                    taken.append(self._waiting.get(timeout=max(0.0, until - time.monotonic())))
                except queue.Empty:
                    break
            rows = np.stack([row for row, _ in taken])
            size = 1 << (len(rows) - 1).bit_length()
            self.batches, self.rows = self.batches + 1, self.rows + len(rows)
            try:
                found = self._predict(np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)]))
                found = {name: np.asarray(x) for name, x in found.items()}
                for i, (_, answer) in enumerate(taken):
                    answer.set_result({name: x[i] for name, x in found.items()})
            except Exception as error:  # any: it is the answer to these requests, and the thread serves the next ones
                for _, answer in taken:
                    answer.set_exception(error)


class Server(ThreadingHTTPServer):
    """A server with a thread for each connection."""

    request_queue_size = 128  # five by default: more clients that connect at once would be refused


def server(file: Path, port: int, most: int, wait: float) -> tuple[Server, Batcher]:
    """Return a server for an exported file, not yet started, and its batcher."""
    exported = load_exported(file)
    shapes = [text.partition("[")[2].rstrip("]").split(",") for text in exported.description["inputs"]]
    shape = shapes[0]
    if len(shapes) != 1 or len(shape) != 2 or shape[0] != "batch":
        raise SystemExit(f"{file} takes {exported.description['inputs']}, but this server sends rows of numbers")
    features = int(shape[1])
    batcher = Batcher(exported, features, most, wait)

    class Handler(BaseHTTPRequestHandler):
        """Answers POST /predict, and GET / with the description of the file."""

        protocol_version = "HTTP/1.1"  # keeps connections open

        def do_GET(self) -> None:
            """Answer with the description of the file, and how many rows were answered in how many batches."""
            self._send(200, {**exported.description, "rows": batcher.rows, "batches": batcher.batches})

        def do_POST(self) -> None:
            """Answer {"rows": [[number, ...], ...]} with the outputs by name, a list for each."""
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != "/predict":
                return self._send(404, {"error": "POST goes to /predict"})
            try:
                rows = np.asarray(json.loads(body)["rows"], np.float32)
            except (ValueError, KeyError, TypeError):
                return self._send(400, {"error": 'send {"rows": [[number, ...], ...]}'})
            if rows.ndim != 2 or rows.shape[1] != features or not len(rows):
                return self._send(400, {"error": f"each row has {features} numbers, but got shape {rows.shape}"})
            answers = [answer.result() for answer in [batcher.submit(row) for row in rows]]
            return self._send(200, {name: [answer[name].tolist() for answer in answers] for name in answers[0]})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing for each request."""

    return Server(("127.0.0.1", port), Handler), batcher


def exported_digits(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Train eight networks on the digits, export them; return the file, and test images with their labels."""
    import jax
    import optax
    from flax import nnx
    from sklearn.datasets import load_digits

    from plurax.ensemble import Batches, Ensemble, Trainer, export

    digits = load_digits()
    x, y = np.float32(digits.data / 16), digits.target

    def make(rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    trainer = Trainer(loss, optax.adam(3e-3))
    batches = Batches((x[:1400], y[:1400]), 64, key=jax.random.key(0))
    state, _ = trainer.fit(trainer.init(Ensemble.create(make, 8, seed=0)), batches, steps=300, progress=False)
    file = folder / "digits.plurax"
    outputs = "mean", "mutual_information"
    export(state.ensemble, file, x[:1], kind="classification", outputs=outputs, platforms=("cpu",))
    return file, x[1400:], y[1400:]


def ask(port: int, rows: np.ndarray) -> dict[str, Any]:
    """Send a request; return the answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict", json.dumps({"rows": rows.tolist()}).encode(), method="POST"
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=None, help="an exported file (default: train on the digits)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one)")
    parser.add_argument("--most", type=int, default=64, help="most rows in a batch, a power of two (default 64)")
    parser.add_argument("--wait", type=float, default=2.0, help="milliseconds to wait for others (default 2)")
    parser.add_argument("--requests", type=int, default=400, help="requests of the demonstration (default 400)")
    parser.add_argument("--clients", type=int, default=16, help="clients at a time (default 16)")
    options = parser.parse_args()
    if options.most < 1 or options.most & (options.most - 1):
        parser.error(f"--most must be a power of two, but got {options.most}")
    if options.file is not None:
        http, _ = server(options.file, options.port, options.most, options.wait / 1e3)
        print(f"http://127.0.0.1:{http.server_port}", flush=True)
        http.serve_forever()
    with tempfile.TemporaryDirectory() as folder:
        file, images, labels = exported_digits(Path(folder))
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
        for most in (1, options.most):
            start = time.perf_counter()
            http, batcher = server(file, options.port, most, options.wait / 1e3)
            ready = time.perf_counter() - start
            threading.Thread(target=http.serve_forever, daemon=True).start()
            seconds, right = [], 0

            def one(i: int, port: int = http.server_port, seconds: list[float] = seconds) -> bool:
                begin = time.perf_counter()
                answer = ask(port, images[i % len(images)][None])
                seconds.append(time.perf_counter() - begin)
                return int(np.argmax(answer["mean"][0])) == labels[i % len(images)]

            start = time.perf_counter()
            with ThreadPoolExecutor(options.clients) as clients:
                right = sum(clients.map(one, range(options.requests)))
            total = time.perf_counter() - start
            http.shutdown()
            http.server_close()
            middle, late = 1e3 * np.quantile(seconds, [0.5, 0.99])
            rate = options.requests / total
            print(f"At most {most} rows a batch: ready in {ready:.1f} s; {rate:.0f} requests a second,")
            print(f"  half of them within {middle:.1f} ms and 99 % within {late:.1f} ms;", end=" ")
            print(f"{batcher.rows / batcher.batches:.1f} rows a batch; {right / options.requests:.1%} right")


if __name__ == "__main__":
    main()

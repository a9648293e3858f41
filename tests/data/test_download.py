"""Downloads, through an opener that is not a network."""

import gzip
import hashlib
import http.client
import io
import threading
import urllib.error
import urllib.request

import pytest
from refusals import refused

from simparallel import data
from simparallel.data import download as module
from simparallel.data.download import HttpsOnly, download
from simparallel.errors import DataError, InputError

CONTENT = b"twelve bytes"
MD5 = hashlib.md5(CONTENT).hexdigest()
A, B = "https://a.example/file", "https://b.example/file"


class Response(io.BytesIO):
    def __init__(self, content, length=None, fail_at=None):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if length is None else length)}
        self.fail_at = fail_at

    def read(self, count=-1):
        if self.fail_at is not None and self.tell() >= self.fail_at:
            raise http.client.IncompleteRead(b"", 5)
        return super().read(count if self.fail_at is None else min(count, self.fail_at))


class Network:
    """An opener: URL -> response, bytes or error; it records the requested URLs."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def open(self, url, *, timeout):
        assert timeout > 0
        self.asked.append(url)
        answer = self.answers[url.split(".")[0][-1]]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Response) else Response(answer)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_arrives_whole(tmp_path):
    network = Network(a=CONTENT)
    path = tmp_path / "new" / "file"
    assert download([A, B], path, md5=MD5, opener=network, size_bytes=12) == path
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file", "file.lock"]
    download([A, B], path, md5=MD5, opener=network)
    assert network.asked == [A]  # the file exists: no further request


def test_damaged_file_is_fetched_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"damaged")
    download([A], path, md5=MD5, opener=Network(a=CONTENT))
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "answer",
    [
        b"another file",
        CONTENT[:-1],
        CONTENT + b"x",
        Response(CONTENT * 9, length=12),
        Response(CONTENT * 9, length="abc"),
        Response(CONTENT, fail_at=6),
        urllib.error.URLError("no route to host"),
        urllib.error.HTTPError(A, 404, "Not Found", {}, None),
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
    ],
)
def test_next_mirror_is_tried(tmp_path, answer):
    """After a bad answer the next mirror is tried, and no partial file stays."""
    network = Network(a=answer, b=CONTENT)
    path = tmp_path / "file"
    with refused(DataError) as caught:
        download([A], path, md5=MD5, size_bytes=12, opener=network)
    assert names(tmp_path) == ["file.lock"]
    assert f"curl -fL --create-dirs -o '{path}' '{A}'" in str(caught.value)
    assert caught.value.path == str(path)
    if isinstance(answer, Response):
        network.answers["a"] = urllib.error.URLError("still not")
    download([A, B], path, md5=MD5, size_bytes=12, opener=network)
    assert path.read_bytes() == CONTENT
    assert network.asked == [A, A, B]


@pytest.mark.parametrize("url", ["http://a.example/f", "file:///etc/passwd", "ftp://a/f", "https:", "/etc/passwd"])
def test_only_https(tmp_path, url):
    network = Network()
    with refused(InputError):
        download([A, url], tmp_path / "file", md5=MD5, opener=network)
    assert network.asked == []


def test_redirect_may_not_leave_https():
    request = urllib.request.Request(A)
    handler = HttpsOnly()
    arguments = (request, None, 302, "Found", {})
    for url in ("http://a.example/f", "ftp://a.example/f"):
        with pytest.raises(urllib.error.URLError, match="not https"):
            handler.redirect_request(*arguments, url)
    assert handler.redirect_request(*arguments, B).full_url == B


def test_unwritable_folder(tmp_path):
    (tmp_path / "taken").write_bytes(b"")
    with refused(DataError):
        download([A], tmp_path / "taken" / "file", md5=MD5, opener=Network())


def test_one_process_downloads_and_others_wait(tmp_path):
    entered, go_on, network = threading.Event(), threading.Event(), Network(a=CONTENT)

    class Slow(Network):
        def open(self, url, *, timeout):
            entered.set()
            assert go_on.wait(10)
            return network.open(url, timeout=timeout)

    path, done = tmp_path / "file", []
    threads = [
        threading.Thread(target=lambda: done.append(download([A], path, md5=MD5, opener=Slow()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    assert not path.exists()
    with refused(DataError):
        download([A], path, md5=MD5, opener=network, deadline_s=0.0)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert done == [path] * 4
    assert network.asked == [A]


def test_time_limit_ends_a_slow_stream(tmp_path, monkeypatch):
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    with refused(DataError):
        download([A], tmp_path / "file", md5=MD5, opener=Network(a=CONTENT), deadline_s=5)


# --- the data sets -----------------------------------------------------------------------------------


def test_datasets_download_only_on_request(tmp_path, monkeypatch):
    asked = []

    def refuse(urls, path, **checks):
        asked.append((urls[0], path.name, tuple(checks)))
        raise DataError("offline", path=str(path), offset=None)

    monkeypatch.setattr(module, "download", refuse)
    for cls in (data.MNIST, data.FashionMNIST, data.CIFAR10):
        with refused(DataError):
            cls(tmp_path)
        assert asked == []
        with refused(DataError):
            cls(tmp_path, download=True)
        url, name, checks = asked.pop()
        assert url.startswith("https://")
        assert url.endswith(name)
        assert "md5" in checks


def test_mnist_is_read_after_its_download(tmp_path, monkeypatch):
    header = b"\0\0\x08"
    files = {
        "t10k-images-idx3-ubyte.gz": gzip.compress(header + b"\x03\0\0\0\x01\0\0\0\x1c\0\0\0\x1c" + bytes(784)),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(header + b"\x01\0\0\0\x01\x07"),
    }

    class Server:
        def open(self, url, *, timeout):
            return Response(files[url.rsplit("/", 1)[1]])

    monkeypatch.setattr(urllib.request, "build_opener", lambda *handlers: Server())
    monkeypatch.setattr(data.MNIST, "md5", {name: hashlib.md5(content).hexdigest() for name, content in files.items()})
    dataset = data.MNIST(tmp_path, train=False, download=True)
    assert dataset.labels.tolist() == [7]
    assert len(data.MNIST(tmp_path, train=False)) == 1


def test_every_file_has_a_checksum_and_https_mirrors():
    for cls in (data.MNIST, data.FashionMNIST):
        assert len(cls.md5) == 4
        assert all(len(md5) == 32 for md5 in cls.md5.values())
        assert all(url.startswith("https://") and url.endswith("/") for url in cls.mirrors)
    assert len(set(data.MNIST.md5.values()) | set(data.FashionMNIST.md5.values())) == 8

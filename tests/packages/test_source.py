"""Environment packages are read, never run: what is one is described, what is none is told why."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import pytest

from verifiers.packages import NotAnEnvironmentError, list_environments, new_package, read_folder, read_wheel

MODULE = '''
def load_environment(n: int = 3, *, mode="a b", **kwargs):
    """Does things.

    More.
    """
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    home = tmp_path / "my_env"
    home.mkdir()
    (home / "pyproject.toml").write_text('[project]\nname = "My-Env"\nversion = "1.2"\n')
    (home / "my_env.py").write_text(MODULE)
    return home


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_folder_says_its_name_version_arguments_and_first_sentence(package):
    found = read_folder(package)
    assert (found.name, found.version, found.module, found.summary) == ("My-Env", "1.2", "my_env", "Does things.")
    assert [str(argument) for argument in found.arguments] == ["n=3", "mode='a b'"]
    assert found.arguments[0].annotation == "int"


def test_what_raises_when_imported_is_read_all_the_same(package):
    (package / "my_env.py").write_text("raise RuntimeError\n" + MODULE)
    assert read_folder(package).arguments


def test_a_package_that_imports_its_function_is_followed(package):
    (package / "my_env.py").unlink()
    (package / "my_env").mkdir()
    (package / "my_env" / "__init__.py").write_text("from .task import load_environment\n")
    (package / "my_env" / "task.py").write_text(MODULE)
    assert [argument.name for argument in read_folder(package).arguments] == ["n", "mode"]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("my_env.py", "x = 1\n", "its module 'my_env' does not define load_environment()"),
        ("my_env.py", "def load_environment(:\n", "is not Python"),
        ("my_env.py", None, "it has neither my_env.py nor my_env/__init__.py"),
        ("pyproject.toml", None, "it has no pyproject.toml (vf init NAME creates a complete package)"),
        ("pyproject.toml", "[project\n", "is not TOML"),
        ("pyproject.toml", "[tool]\n", "has no name under [project]"),
    ],
    ids=["no function", "no python", "no module", "no project", "no toml", "no name"],
)
def test_a_folder_that_is_none_says_why(package, file, text, why):
    if text is None:
        (package / file).unlink()
    else:
        (package / file).write_text(text)
    with pytest.raises(NotAnEnvironmentError) as caught:
        read_folder(package)
    assert why in str(caught.value)


def test_a_wheel_is_read_without_being_unpacked(tmp_path):
    about = "Metadata-Version: 2.1\nName: my-env\nVersion: 0.3\n"
    found = read_wheel(wheel(tmp_path / "a.whl", **{"my_env.py": MODULE, "my_env-0.3.dist-info/METADATA": about}))
    assert (found.name, found.version, found.module) == ("my-env", "0.3", "my_env")


def test_a_wheel_whose_module_has_another_name_is_found_too(tmp_path):
    about = "Name: org-my-env\nVersion: 0.3\n"
    files = {"other/__init__.py": MODULE, "org_my_env-0.3.dist-info/METADATA": about}
    assert read_wheel(wheel(tmp_path / "a.whl", **files)).module == "other"


def test_a_wheel_that_is_none_says_why(tmp_path):
    about = "Name: requests\nVersion: 1\n"
    files = {"requests/__init__.py": "", "requests-1.dist-info/METADATA": about}
    with pytest.raises(NotAnEnvironmentError, match=r"'requests' does not define load_environment"):
        read_wheel(wheel(tmp_path / "a.whl", **files))
    (tmp_path / "b.whl").write_text("no zip")
    with pytest.raises(NotAnEnvironmentError, match=r"b\.whl is not a wheel"):
        read_wheel(tmp_path / "b.whl")
    with pytest.raises(NotAnEnvironmentError, match="has no METADATA"):
        read_wheel(wheel(tmp_path / "c.whl", a="b"))


def test_a_new_package_reads_back_and_never_writes_over_another(tmp_path):
    for name, is_multi_file in (("my-env", False), ("other", True)):
        new_package(name, tmp_path, is_multi_file=is_multi_file)
        assert read_folder(tmp_path / name.replace("-", "_")).name == name
    with pytest.raises(FileExistsError, match="my_env exists already"):
        new_package("my-env", tmp_path)


@pytest.mark.parametrize("name", ["../x", "My Env", "", "1st", "verifiers", "a--b", "json", "string"])
def test_a_name_that_could_not_be_a_package_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="cannot be the name of an environment"):
        new_package(name, tmp_path)


def test_a_folder_lists_its_environments_and_skips_the_rest(tmp_path, package):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "plain.py").write_text(MODULE)
    (tmp_path / "notes").mkdir()
    local = [listed for listed in list_environments(tmp_path) if listed.is_local]
    assert [listed.package.name for listed in local] == ["My-Env", "plain"]


# --- wheels that are traps --------------------------------------------------------------------------------------------

ABOUT = "Metadata-Version: 2.1\nName: my-env\nVersion: 0.1\n"


def packed(path: Path, sizes: dict[str, int], *, way: int = zipfile.ZIP_DEFLATED) -> Path:
    """A wheel whose files hold so many spaces after what they should hold: small packed, large unpacked."""
    with zipfile.ZipFile(path, "w", way) as archive:
        for name, size in {"my_env.py": 0, "my_env-0.1.dist-info/METADATA": 0, **sizes}.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write((ABOUT if name.endswith("METADATA") else MODULE).encode())
                for start in range(0, size, 1 << 20):
                    file.write(b" " * min(1 << 20, size - start))
    return path


def test_a_small_wheel_is_read(tmp_path: Path) -> None:
    assert read_wheel(packed(tmp_path / "a.whl", {"my_env.py": 1000})).module == "my_env"


@pytest.mark.parametrize("name", ["my_env.py", "my_env-0.1.dist-info/METADATA"])
def test_a_small_wheel_with_a_huge_module_or_huge_metadata_is_refused_before_it_is_unpacked(
    name: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / "bomb.whl", {name: 300 << 20})
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(NotAnEnvironmentError, match=r"has 315 MB; the limit for modules and metadata is 4 MiB"):
            read_wheel(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def declare(path: Path, name: str, size: int) -> None:
    """Write another size into the wheel's directory, as whoever makes a trap would."""
    content = bytearray(path.read_bytes())
    start = content.rfind(name.encode()) - 46
    assert content[start : start + 4] == b"PK\x01\x02"
    content[start + 24 : start + 28] = size.to_bytes(4, "little")
    path.write_bytes(content)


def test_a_wheel_that_says_it_is_smaller_than_it_is_is_not_unpacked_further_than_a_module_is_long(
    tmp_path: Path,
) -> None:
    path = packed(tmp_path / "liar.whl", {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("my_env-0.1.dist-info/METADATA", ABOUT)
        archive.writestr("my_env.py", MODULE.encode() + b" " * (40 << 20))
    declare(path, "my_env.py", 100)
    tracemalloc.start()
    try:
        with pytest.raises(NotAnEnvironmentError, match="is not a wheel"):  # its checksum does not fit either
            read_wheel(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_wheel_that_unpacks_to_more_than_one_installs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("my_env.py", MODULE)
        archive.writestr("my_env-0.1.dist-info/METADATA", ABOUT)
        archive.writestr("data.bin", b" ")
    declare(path, "data.bin", 3_000_000_000)
    with pytest.raises(NotAnEnvironmentError, match=r"many.whl unpacks to 3.0 GB"):
        read_wheel(path)


@pytest.mark.parametrize("way", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_ways_of_packing_that_wheels_do_not_use_are_not_tried(way: int, tmp_path: Path) -> None:
    with pytest.raises(NotAnEnvironmentError, match="has a compression that wheels do not use"):
        read_wheel(packed(tmp_path / "a.whl", {}, way=way))


@pytest.mark.parametrize("text", ["(" * 100_000, "-" * 100_000 + "1", "[" * 5000 + "]" * 5000, "\0"])
def test_a_module_that_no_parser_takes_is_told(text: str, package: Path) -> None:
    (package / "my_env.py").write_text(text)
    with pytest.raises(NotAnEnvironmentError, match="is not Python"):
        read_folder(package)


def test_a_folder_with_a_huge_module_or_a_device_for_one_is_refused(package: Path) -> None:
    with open(package / "my_env.py", "wb") as file:
        file.truncate(3 << 30)  # a hole: no room is taken
    with pytest.raises(NotAnEnvironmentError, match="larger than the limit of 4 MiB"):
        read_folder(package)
    (package / "my_env.py").unlink()
    (package / "my_env.py").symlink_to("/dev/zero")
    with pytest.raises(NotAnEnvironmentError, match="it has neither"):
        read_folder(package)

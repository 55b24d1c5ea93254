"""Models of the Hugging Face hub: from a name to files on this machine, downloaded once and kept in the hub's cache.

`huggingface_hub` speaks to the hub (and reads HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE); here it is decided which
files of a repository make a model, and every way in which that can fail becomes one sentence. Knows no file formats.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import ConfigError, ModelFileError, OctavoError
from octavo.weights.gguf import split_paths
from octavo.weights.open_checkpoint import gguf_models

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<pattern>[\w./-]+))?")
WEIGHT_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
TIMEOUT_SECONDS = 10.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Beside the weights; a folder has some of them.
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATE_FOLDER = "additional_chat_templates/"


@dataclass(frozen=True, slots=True)
class Choice:
    """files: what to download. main: the GGUF file to open, or nothing for the folder."""

    files: tuple[str, ...]
    main: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model repository in the cache. revisions: branches and tags, or the commit where there is none."""

    name: str
    revisions: tuple[str, ...]
    num_bytes: int
    num_files: int


def looks_like_hub_name(text: str) -> bool:
    """Whether it reads as `org/name` or `org/name:PATTERN`; a path to a file of weights does not."""
    match = NAME.fullmatch(text)
    return match is not None and not match["repo"].endswith(WEIGHT_ENDINGS)


def fetch(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    tokenizer_only: bool = False,
    progress: bool = True,
) -> Path:
    """The model `org/name` on this machine: a folder, or the (first) GGUF file. What is not in the cache is downloaded.

    `org/name:PATTERN` picks the GGUF model whose name has PATTERN. revision: a branch, tag or commit. download_dir: the
    cache, instead of the hub's own. tokenizer_only: without the weights, if the tokenizer has files of its own.
    progress: bars on a terminal. Raises ConfigError for what another name, a token or a network mends, ModelFileError
    for files.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no name of the hub: it must be org/name, or org/name:PATTERN for a GGUF")
    from huggingface_hub import HfApi, snapshot_download

    repo, pattern, cache = match["repo"], match["pattern"], _cache(download_dir)
    pick = choose_tokenizer if tokenizer_only else choose
    with _failures_explained(repo, revision, cache):
        try:
            info = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_SECONDS)
        except Exception as error:
            copy = _copy(cache, repo, revision) if _hub_is_away(error) else None
            if copy is None:
                raise
            there = [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]
            return copy / pick(there, pattern, f"the copy of {repo} in {cache}", repo).main
        chosen = pick([file.rfilename for file in info.siblings or ()], pattern, repo, repo)
        with _bars(progress and sys.stderr.isatty()):
            folder = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[glob.escape(file) for file in chosen.files],
                cache_dir=cache,
                etag_timeout=TIMEOUT_SECONDS,
            )
    return Path(folder) / chosen.main


def cached_models(download_dir: str | None = None) -> list[CachedModel]:
    """What is in the cache, by name. Raises ConfigError if that is no folder."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    cache = _cache(download_dir)
    try:
        repos = [repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{cache} cannot be read as a cache of the hub ({error}): name a folder") from error
    models = []
    for repo in repos:
        names = sorted({ref for r in repo.revisions for ref in (r.refs or {r.commit_hash[:12]})})
        models.append(CachedModel(repo.repo_id, tuple(names), repo.size_on_disk, repo.nb_files))
    return sorted(models, key=lambda model: model.name.lower())


def choose(files: Iterable[str], pattern: str | None, where: str, repo: str) -> Choice:
    """Which files of a repository make the model. Raises ModelFileError if none or several do."""
    names = sorted(files)
    models = [path.as_posix() for path in gguf_models(Path(name) for name in names if name.endswith(".gguf"))]
    if pattern is not None:
        wanted = pattern.lower()
        found = [name for name in models if wanted in name.lower()]
        # Q4_K is in the name of every Q4_K_M; followed by a dot or a dash it is meant itself.
        exact = [name for name in found if re.search(re.escape(wanted) + r"([.-]|$)", name.lower())]
        return _gguf(exact or found, names, f"with {pattern!r} in its name", models, where, repo)
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith((".safetensors", ".safetensors.index.json"))]
    weights = [name for name in weights if name.startswith("model")] or weights
    if weights and "config.json" in top:
        return Choice((*_side_files(names), *weights), "")
    return _gguf(models, names, "or safetensors with a config.json", models, where, repo)


def choose_tokenizer(files: Iterable[str], pattern: str | None, where: str, repo: str) -> Choice:
    """Which files of a repository make the tokenizer: those beside the weights, or a GGUF model that has it inside."""
    names = sorted(files)
    side = _side_files(names)
    if pattern is None and any(name in TOKENIZER_FILES for name in side):
        return Choice(tuple(side), "")
    return choose(names, pattern, where, repo)


def _side_files(names: list[str]) -> list[str]:
    return [name for name in names if name in SIDE_FILES or name.startswith(TEMPLATE_FOLDER)]


def _gguf(found: list[str], names: list[str], which: str, models: list[str], where: str, repo: str) -> Choice:
    if not found:
        there = f"it has {', '.join(models or names) or 'no files'}"
        raise ModelFileError(f"{where} has no GGUF model {which}: {there}; octavo reads GGUF and safetensors")
    if len(found) > 1:
        raise ModelFileError(
            f"{where} has {len(found)} GGUF models ({', '.join(found)}): name one by a part of its name, such as "
            f"{repo}:{_distinct_part(found[0])}"
        )
    parts = [path.as_posix() for path in split_paths(Path(found[0]))]
    return Choice(tuple(parts), parts[0])


def _distinct_part(name: str) -> str:
    """The quantization in a file's name, or the whole name."""
    match = re.search(r"(?i)\b(I?Q\d\w*|BF16|F16|F32)\b", Path(name).name)
    return match[1] if match else Path(name).stem


def _cache(download_dir: str | None) -> Path:
    from huggingface_hub import constants

    return Path(os.path.expanduser(download_dir or constants.HF_HUB_CACHE))


def _copy(cache: Path, repo: str, revision: str | None) -> Path | None:
    """The folder of what was downloaded before, or None."""
    home = cache / f"models--{repo.replace('/', '--')}"
    reference = home / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = home / "snapshots" / commit if commit else None
    return folder if folder is not None and folder.is_dir() else None


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _is_of_network(error: BaseException) -> bool:
    """The library's HTTP client differs between its versions."""
    client = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or client in ("httpx", "httpx2", "requests", "urllib3")


def _status(error: BaseException) -> int:
    """Of an error that came as an answer, else 0."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _hub_is_away(error: BaseException) -> bool:
    status = _status(error)
    return status >= 500 or status == 429 or (status == 0 and _is_of_network(error))


@contextmanager
def _failures_explained(repo: str, revision: str | None, cache: Path) -> Iterator[None]:
    from huggingface_hub import constants, errors

    try:
        yield
    except OctavoError:
        raise
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{repo}"
        raise ConfigError(f"{repo} is gated: ask for access at {page}, and set HF_TOKEN to a token of yours") from None
    except errors.RepositoryNotFoundError as error:
        if _status(error) == 401:  # the hub does not say which
            raise ConfigError(
                f"{repo} does not exist or is private: check the name, and for a private one set HF_TOKEN to a token "
                "that may read it"
            ) from None
        raise ConfigError(f"{repo} is not on the hub: check the name (org/name), or give a path") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{repo} has no revision {revision!r}: give a branch, a tag or a whole commit hash, or leave --revision out"
        ) from None
    except Exception as error:
        raise _explained(error, repo, cache) from error


def _explained(error: Exception, repo: str, cache: Path) -> Exception:
    """The error to raise instead; the hub's library chains those of its HTTP client and of the system."""
    from huggingface_hub import constants

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for each in chain:
        if isinstance(each, OSError) and each.errno in NO_SPACE:
            return ModelFileError(
                f"there is no room for {repo} in {cache} ({each.strerror}): make some, or name another folder with "
                "--download-dir or HF_HOME"
            )
        if isinstance(each, PermissionError | NotADirectoryError | FileExistsError):
            return ModelFileError(f"cannot write to {cache} ({each.strerror}): name another folder with --download-dir")
    if constants.HF_HUB_OFFLINE:
        return ConfigError(f"{repo} is not in {cache}, and HF_HUB_OFFLINE forbids to download it: unset that")
    status = next(filter(None, map(_status, chain)), 0)
    if status in (401, 403):
        return ConfigError(f"the hub denies {repo} to this token ({status}): set HF_TOKEN to one that may read it")
    if status:
        return ConfigError(f"the hub answers {status} for {repo}: try again later")
    if any(map(_is_of_network, chain)):
        return ConfigError(
            f"{repo} is not in {cache}, and the hub at {constants.ENDPOINT} cannot be reached or broke off: check the "
            "network and try again (a download goes on where it stopped), or give a path"
        )
    return error

"""What a server shows at /metrics, read back as Prometheus reads it."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import ServerProcess


@dataclass(frozen=True)
class Scrape:
    values: dict[str, float]  # by sample name, and with `{reason}` behind it where a sample has one
    kinds: dict[str, str]  # by family name, as TYPE lines give it

    def __getitem__(self, name: str) -> float:
        """A sample's value, 0 if it is not there. The name is without its prefix."""
        return self.values.get(name, 0.0)

    def grown(self, before: Scrape, *names: str) -> dict[str, float]:
        return {name: self[name] - before[name] for name in names}


def scrape(process: ServerProcess, prefix: str = "octavo") -> Scrape:
    text = httpx.get(f"{process.url}/metrics").raise_for_status().text
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        kinds[family.name.removeprefix(f"{prefix}:")] = family.type
        for sample in family.samples:
            name = sample.name.removeprefix(f"{prefix}:")
            if "finished_reason" in sample.labels:
                name += "{" + sample.labels["finished_reason"] + "}"
            if "le" not in sample.labels:
                values[name] = values.get(name, 0.0) + sample.value
    return Scrape(values, kinds)

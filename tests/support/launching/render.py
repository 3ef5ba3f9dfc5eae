"""Lints and renders the chart as Helm does, in the environment of `make chart`: JSON in, JSON out.

In: {"chart", "values", "name", "namespace", "kubernetes": [versions]}. Out: {"messages": what lint says,
"manifests": by template, "broken": by version, what Kubernetes' own schemas say, "unknown": kinds that have no schema}.
"""

from __future__ import annotations

import json
import sys

import kubernetes_validate
import yaml
from helm_python import Chart, HelmError, chart


def main() -> None:
    asked = json.load(sys.stdin)
    values = asked["values"]
    try:
        linted = chart.lint(asked["chart"], values, strict=True)
        with Chart.load(asked["chart"]) as loaded:
            manifests = loaded.render(values, name=asked["name"], namespace=asked["namespace"])
    except HelmError as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    documents = [
        document
        for template, text in manifests.items()
        if template.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    broken: dict[str, list[str]] = {version: [] for version in asked["kubernetes"]}
    unknown: set[str] = set()
    for version, found in broken.items():
        for document in documents:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.SchemaNotFoundError:
                unknown.add(document["kind"])
            except kubernetes_validate.ValidationError as error:
                found.append(f"{document['kind']} {document['metadata']['name']}: {error.message}")
    messages = [one for one in linted["messages"] if one["severity"] > 1]
    json.dump({"messages": messages, "manifests": manifests, "broken": broken, "unknown": sorted(unknown)}, sys.stdout)


if __name__ == "__main__":
    main()

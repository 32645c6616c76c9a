"""A fresh MLflow database per test, copied from one that is migrated once per test session."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared between the workers of pytest-xdist: making it takes seconds and is safe from several processes."""
    from tasks.tracking import initialise_database

    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / "mlflow-template"
    folder.mkdir(exist_ok=True)
    initialise_database(folder / "mlflow.db", folder / "artifacts")
    return folder / "mlflow.db"


@pytest.fixture
def mlflow_uri(mlflow_template: Path, tmp_path: Path) -> str:
    database = tmp_path / "mlflow.db"
    shutil.copy(mlflow_template, database)
    return f"sqlite:///{database}"

"""An equilibrium classifier with scikit-learn: pipeline, grid search, comparison, certificate.

python examples/sklearn_pipeline.py
"""

from __future__ import annotations

import time

from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import equilibria as eq


def main() -> None:
    x, y = load_digits(return_X_y=True)
    train, test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    ours = eq.sklearn.EquilibriumClassifier(random_state=0)
    models = {
        "EquilibriumClassifier (GEQ)": ours,
        "  layer='opteq'": eq.sklearn.EquilibriumClassifier(layer="opteq", random_state=0),
        "  layer='explicit'": eq.sklearn.EquilibriumClassifier(layer="explicit", random_state=0),
        "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "MLPClassifier": make_pipeline(StandardScaler(), MLPClassifier((64, 64), random_state=0)),
        "SVC": make_pipeline(StandardScaler(), SVC()),
    }
    print(f"digits, {len(train)} rows to train on, {len(test)} held out\n")
    print(f"{'model':30}  {'accuracy':>8}  {'seconds':>7}")
    for name, model in models.items():
        started = time.perf_counter()
        model.fit(train, y_train)
        seconds = time.perf_counter() - started
        print(f"{name:30}  {model.score(test, y_test):8.4f}  {seconds:7.1f}")

    print("\nwhat is proven about the first eight held-out equilibria:\n")
    print(ours.certify(test[:8]))

    pipeline = make_pipeline(
        PCA(random_state=0), eq.sklearn.EquilibriumClassifier(max_iter=15, random_state=0)
    )
    grid = GridSearchCV(
        pipeline,
        {"pca__n_components": [16, 40], "equilibriumclassifier__weight_decay": [0.01, 1.0]},
        cv=2,
    ).fit(train[:600], y_train[:600])
    print(f"\ngrid: {grid.best_params_}, {grid.best_score_:.4f}")


if __name__ == "__main__":
    main()

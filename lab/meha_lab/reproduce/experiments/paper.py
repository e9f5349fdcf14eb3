"""Numbers that the paper reports (Liu, Liu, Yao, Zeng and Zhang, ICML 2024), for comparison."""

from __future__ import annotations

__all__ = ["FEW_SHOT", "GROUP_LASSO", "HIGH_DIMENSION", "HYPER_CLEANING", "LASSO", "SENSITIVITY", "SINE", "STRONG_CONVEX"]


# Seconds, and memory as printed there (bytes), in the strongly convex case.
STRONG_CONVEX = {
    "RHG": (14.01, 160768),
    "BDA": (50.13, 212480),
    "IAPTT": (31.98, 160768),
    "CG": (15.66, 111104),
    "NS": (21.10, 110592),
    "BRC": (19.48, 12800),
    "BOME": (11.18, 14848),
    "F2SA": (16.21, 12288),
    "BAMM": (2.650, 14848),
    "MEHA": (0.166, 1536),
}

# Seconds by n.
HIGH_DIMENSION = {
    10_000: {"RHG": 70.59, "CG": 36.97, "NS": 40.53, "BAMM": 5.890, "MEHA": 1.973},
    30_000: {"RHG": 110.26, "CG": 64.21, "NS": 65.73, "BAMM": 5.949, "MEHA": 2.444},
}

SINE = {
    1: {"BVFIM": 53.50, "BOME": 5.062, "IAPTT": 21.23, "MEHA": 0.774},
    10: {"BVFIM": 224.37, "BOME": 6.348, "IAPTT": 35.73, "MEHA": 2.342},
    50: {"BVFIM": 1106.45, "BOME": 11.02, "IAPTT": 154.54, "MEHA": 9.552},
    100: {"BVFIM": 1846.55, "BOME": 16.48, "IAPTT": 290.82, "MEHA": 12.26},
    200: {"BVFIM": 3729.74, "BOME": 44.47, "IAPTT": 622.77, "MEHA": 33.41},
    300: {"BVFIM": 4978.18, "BOME": 48.73, "IAPTT": 1164.16, "MEHA": 37.85},
    500: {"BVFIM": 6639.03, "BOME": 52.83, "IAPTT": 1657.46, "MEHA": 40.25},
    1000: {"BVFIM": 8348.92, "BOME": 68.65, "IAPTT": 3537.19, "MEHA": 47.45},
}

LASSO = {
    2: {"GridSearch": 14.87, "RandomSearch": 17.11, "TPE": 3.32, "MEHA": 1.91},
    100: {"RandomSearch": 86.27, "TPE": 232.61, "MEHA": 2.34},
    1000: {"RandomSearch": 700.74, "TPE": 2244.44, "MEHA": 22.83},
}

# Test error (mean, standard deviation) and seconds (mean, standard deviation) by m.
GROUP_LASSO = {
    600: {
        "GridSearch": (84.2, 16.1, 4.1, 0.0),
        "RandomSearch": (176.5, 29.8, 4.5, 1.1),
        "TPE": (123.9, 26.1, 11.7, 2.6),
        "IGJO": (96.7, 15.6, 0.5, 0.3),
        "VFiDCA": (74.7, 11.0, 0.5, 0.0),
        "MEHA": (71.9, 10.5, 0.3, 0.2),
    },
    1200: {
        "GridSearch": (87.9, 8.4, 11.8, 0.1),
        "RandomSearch": (170.4, 17.1, 10.7, 0.1),
        "TPE": (157.2, 24.7, 58.2, 6.9),
        "IGJO": (107.8, 12.2, 6.4, 5.2),
        "VFiDCA": (85.2, 8.3, 8.8, 2.4),
        "MEHA": (84.3, 8.3, 2.3, 0.3),
    },
    2400: {
        "GridSearch": (89.5, 11.6, 25.8, 0.7),
        "RandomSearch": (141.9, 29.9, 22.3, 1.2),
        "TPE": (146.1, 20.3, 89.8, 15.9),
        "IGJO": (115.5, 15.6, 12.9, 5.4),
        "VFiDCA": (85.2, 11.3, 16.9, 0.5),
        "MEHA": (85.1, 11.4, 2.2, 0.3),
    },
    3600: {
        "GridSearch": (91.3, 17.0, 38.3, 7.8),
        "RandomSearch": (132.1, 18.7, 42.6, 0.5),
        "TPE": (110.2, 24.0, 157.8, 2.4),
        "IGJO": (120.4, 14.9, 24.6, 6.7),
        "VFiDCA": (90.0, 15.6, 49.2, 3.7),
        "MEHA": (89.5, 15.8, 2.5, 0.3),
    },
}

# Rows of the two sensitivity tables: which number differs from the first row and its value (beside it gamma = 100 where
# the table has that), the steps and the seconds. The first row is alpha .1, beta 1e-5, eta .1, gamma 10, c 2, p .49.
SENSITIVITY: dict[str, list[tuple[dict[str, float], int, float]]] = {
    "main": [
        ({}, 97, 22.83),
        ({"alpha": 0.05}, 109, 25.55),
        ({"alpha": 0.5}, 88, 13.66),
        ({"alpha": 0.8}, 86, 9.65),
        ({"beta": 2e-5}, 91, 22.01),
        ({"beta": 3e-5}, 85, 13.41),
        ({"beta": 5e-6}, 105, 18.24),
        ({"eta": 0.5}, 88, 12.82),
        ({"eta": 0.8}, 88, 9.50),
        ({"eta": 0.01}, 199, 51.99),
        ({"gamma": 2.0}, 89, 19.19),
        ({"gamma": 20.0}, 89, 9.82),
        ({"gamma": 100.0}, 90, 15.3),
        ({"c": 10.0}, 105, 17.52),
        ({"c": 50.0}, 107, 17.22),
        ({"c": 100.0}, 99, 10.75),
        ({"p": 0.05}, 956, 10.53),
        ({"p": 0.15}, 95, 10.42),
        ({"p": 0.30}, 93, 10.13),
    ],
    "additional": [
        ({}, 97, 22.83),
        ({"alpha": 0.025}, 95, 10.30),
        ({"alpha": 0.2}, 88, 9.65),
        ({"alpha": 0.4, "gamma": 100.0}, 88, 12.55),
        ({"alpha": 0.6}, 86, 9.53),
        ({"beta": 2e-6}, 106, 11.53),
        ({"beta": 8e-6, "gamma": 100.0}, 99, 10.74),
        ({"beta": 3.5e-5}, 82, 11.71),
        ({"eta": 0.02}, 142, 15.43),
        ({"eta": 0.08}, 100, 10.91),
        ({"eta": 0.4, "gamma": 100.0}, 89, 9.59),
        ({"eta": 0.6}, 88, 9.59),
        ({"gamma": 4.0}, 90, 9.84),
        ({"gamma": 50.0}, 89, 9.71),
        ({"gamma": 200.0}, 90, 9.91),
        ({"c": 5.0}, 94, 10.20),
        ({"c": 20.0}, 97, 10.65),
        ({"c": 80.0}, 38, 10.74),
        ({"p": 0.1}, 97, 10.59),
        ({"p": 0.2}, 96, 10.43),
        ({"p": 0.4}, 90, 9.69),
    ],
}

# Test accuracy and F1 score in percent.
HYPER_CLEANING = {
    "mnist": {
        "RHG": (86.93, 89.46),
        "BDA": (85.83, 89.20),
        "CG": (84.02, 81.39),
        "BAMM": (88.60, 89.91),
        "IAPTT": (87.57, 91.10),
        "BOME": (88.19, 87.95),
        "VPBGD": (89.10, 90.64),
        "MEHA": (89.55, 91.26),
    },
    "fashion-mnist": {
        "RHG": (80.87, 88.67),
        "BDA": (80.93, 87.75),
        "CG": (80.15, 88.32),
        "BAMM": (81.64, 88.16),
        "IAPTT": (81.87, 89.25),
        "BOME": (82.16, 85.01),
        "VPBGD": (81.72, 89.93),
        "MEHA": (83.19, 89.94),
    },
}

# Test accuracy in percent and seconds, by the number of classes.
FEW_SHOT = {
    10: {
        "RHG": (89.77, 557.71),
        "BDA": (89.61, 869.98),
        "CG": (89.56, 363.76),
        "BAMM": (90.57, 180.48),
        "IAPTT": (89.66, 299.27),
        "BOME": (89.76, 191.25),
        "VPBGD": (90.28, 315.59),
        "MEHA": (91.17, 130.81),
    },
    20: {
        "RHG": (90.17, 550.51),
        "BDA": (89.78, 1187.63),
        "CG": (89.39, 602.24),
        "BAMM": (90.13, 255.99),
        "IAPTT": (89.57, 3450.80),
        "BOME": (89.49, 273.19),
        "VPBGD": (90.00, 649.93),
        "MEHA": (89.96, 235.77),
    },
}

# Accuracy in percent: search train, search valid, inference train, inference valid, test; then parameters in millions.
ARCHITECTURE_SEARCH = {
    "DARTS, order 1": (98.320, 88.940, 99.481, 95.639, 95.569, 1.277),  # the paper does not say which order
    "P-DARTS": (96.168, 90.488, 99.802, 95.701, 95.710, 1.359),
    "PC-DARTS": (84.821, 83.516, 98.163, 95.630, 95.540, 1.570),
    "RHG": (98.448, 89.556, 99.688, 95.340, 95.340, 1.359),
    "CG": (99.126, 89.298, 98.909, 95.499, 95.370, 1.268),
    "IAPTT": (98.904, 99.512, 99.776, 95.840, 95.809, 1.963),
    "MEHA": (99.060, 99.764, 99.419, 96.150, 96.070, 1.524),
    "MEHA, Swish": (99.292, 99.786, 99.360, 95.870, 95.870, 1.479),
}

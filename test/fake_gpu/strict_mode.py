"""Call on the fake GPU, in torch's strict mode, what the trainer calls there in a thread. A refusal raises."""

import torch
import values


def main():
    values.install()
    torch.use_deterministic_algorithms(True)
    for shape in ((1, 50_000), (3, 500)):  # torch has a deterministic kernel of its own for one row
        rows = torch.rand(shape, dtype=torch.float64)
        assert torch.allclose(rows.to("cuda").cumsum(-1).cpu(), rows.cumsum(-1), rtol=1e-12)
    print("no refusal")


if __name__ == "__main__":
    main()

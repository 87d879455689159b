"""Lightning's TransformerEnginePrecision trains through TransformerEngine as it does on a GPU: its own replacement of
layers and recipe."""

import lightning
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.plugins.precision import TransformerEnginePrecision


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
        )
        self.losses = []

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", [None, {"fp8_format": "E4M3", "amax_history_len": 4}], ids=["default", "given"])
def test_a_model_learns_in_fp8(accelerator, recipe, products):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 64)), batch_size=32
    )
    model = Model()
    trainer = lightning.Trainer(
        plugins=[TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)], accelerator=accelerator,
        devices=1,
        max_epochs=5, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    assert [type(module) for module in model.layers] == [te.LayerNorm, te.Linear, torch.nn.GELU, te.Linear]
    assert model.layers[1].fp8_meta["recipe"].fp8_format.name == (recipe or {"fp8_format": "HYBRID"})["fp8_format"]
    assert sum(model.losses[-3:]) < 0.5 * sum(model.losses[:3])
    assert products.count(("Float8TensorStorage", "Float8TensorStorage")) == len(products) == len(model.losses) * 6


@pytest.mark.parametrize("where", [0, "cuda", torch.device("cuda", 1)])
def test_a_module_of_lightnings_goes_where_it_is_sent(where):
    """It reads the arguments of its ``to`` itself, by torch's function."""
    module = lightning.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    assert module.to(where).device == module.to(device=where).device == torch.device("cpu")
    assert torch.nn.utils.rnn.pack_sequence([torch.ones(2)]).to(where).data.tolist() == [1.0, 1.0]

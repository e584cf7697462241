"""torchvision's RetinaNet, harmonized over whole batches: mean IoU of the best detections before and after training."""

import torch
from torchvision import models, ops, utils

import ghmdet


class Head(models.detection.retinanet.RetinaNetHead):  # retinanet_resnet50_fpn takes one too: head=Head(256, 9, 91)
    def compute_loss(self, targets, out, anchors, matches):  # matches: an object's row, -1 none, -2 ignored
        rows = [torch.column_stack((t["boxes"], t["labels"])) for t in targets]
        rows = [torch.cat((row, row.new_full((1, 5), -1)))[m.clamp(min=-1)] for row, m in zip(rows, matches)]
        match, labels = torch.stack(matches).unsqueeze(2), torch.stack(rows)[..., 4].long()  # background reads the -1
        deltas = torch.stack(self.regression_head.box_coder.encode([row[:, :4] for row in rows], anchors))
        ghmc = self.ghmc(out["cls_logits"], labels, valid=match != -2)
        return {"classification": ghmc, "bbox_regression": self.ghmr(out["bbox_regression"], deltas, valid=match >= 0)}


def main():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(ops.Conv2dNormActivation(c, 32, stride=2) for c in (3, 32, 32, 32)))
    backbone = models.detection.backbone_utils.BackboneWithFPN(layers, {"2": "0", "3": "1"}, [32, 32], 32)
    anchors = models.detection.anchor_utils.AnchorGenerator(((20,), (30,), (40,)), ((0.7, 1.4),) * 3)
    model = models.detection.RetinaNet(backbone, 2, 64, 64, None, None, anchors, Head(32, 2, 2, torch.nn.BatchNorm2d))
    model.head.ghmr, model.head.ghmc = ghmdet.GHMR(mu=0.1), ghmdet.GHMC(max_weight=30)  # unbounded, few anchors rule
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    targets = [{"boxes": 16 * b, "labels": torch.randint(2, (1,))} for b in torch.rand(900, 1, 4) + torch.arange(4)]
    images = [utils.draw_bounding_boxes(torch.rand(3, 64, 64), t["boxes"], fill=bool(t["labels"])) for t in targets]
    for text, steps in (("mean IoU: {:.3f} before, ", 0), ("{:.3f} after\n", 100)):
        for start in range(100, 100 + 8 * steps, 8):
            optimizer.zero_grad()
            sum(model.train()(images[start : start + 8], targets[start : start + 8]).values()).backward()
            optimizer.step()
        ious = [ops.box_iou(d["boxes"][:1], t["boxes"]).sum() for d, t in zip(model.eval()(images[:100]), targets)]
        print(text.format(torch.stack(ious).mean()), end="")


if __name__ == "__main__":
    main()

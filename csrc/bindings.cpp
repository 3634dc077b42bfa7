// The native backend's table of contents: every schema and every Python-visible name, nothing else.
// Kernels are registered for their devices at the foot of csrc/ops/<family>.cpp.
#include <string>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include "build_info.h"
#include "ops/adam.h"
#include "ops/add_norm.h"
#include "ops/call_kind.h"
#include "ops/cross_entropy.h"
#include "ops/gradients.h"
#include "ops/norm.h"
#include "ops/same_objects.h"

namespace py = pybind11;

TORCH_LIBRARY(fusedops, m) {
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "layer_norm_fwd(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
      "ScalarType? out_dtype) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_bwd(Tensor dy, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, "
      "bool[3] output_mask, ScalarType? bias_dtype=None) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float eps=1e-06, "
      "float weight_offset=0., ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "rms_norm_fwd(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps, float weight_offset, "
      "ScalarType? out_dtype) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_bwd(Tensor dy, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor rstd, "
      "float weight_offset, bool[2] output_mask) -> (Tensor dx, Tensor dweight)");

  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100, str reduction='mean', "
      "float label_smoothing=0., float z_loss=0., float? softcap=None, bool inplace_backward=False) -> Tensor");
  m.def(
      "cross_entropy_fwd(Tensor input, Tensor target, Tensor? weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, float? softcap) -> (Tensor loss, Tensor stats, Tensor total_weight)");
  m.def(
      "cross_entropy_bwd(Tensor dloss, Tensor input, Tensor target, Tensor? weight, Tensor stats, Tensor total_weight, "
      "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap) -> Tensor");
  m.def(
      "cross_entropy_bwd_(Tensor(a!) input, Tensor dloss, Tensor target, Tensor? weight, Tensor stats, "
      "Tensor total_weight, int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap) -> "
      "()");

  // Those that may draw random numbers themselves say so; the halves are told the seed, so they may be run again.
  const std::vector<at::Tag> random{at::Tag::nondeterministic_seeded};
  // torch.jit would fold a draw of known arguments into a constant, unless it takes it for one with side effects.
  m.def(torch::schema("dropout_seed(Tensor like) -> Tensor", c10::AliasAnalysisKind::CONSERVATIVE), random);
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, float dropout_p=0., bool post_norm=False, ScalarType? out_dtype=None, "
      "ScalarType? residual_dtype=None, *, Tensor? seed=None) -> (Tensor y, Tensor residual_out)",
      random);
  m.def(
      "add_layer_norm_fwd(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps, Tensor? seed, float dropout_p, bool post_norm, bool keep_total, ScalarType? out_dtype, "
      "ScalarType? residual_dtype) -> (Tensor y, Tensor residual_out, Tensor total, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_bwd(Tensor dy, Tensor? dresidual_out, Tensor total, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, float dropout_p, bool post_norm, "
      "bool[4] output_mask, ScalarType input_dtype, ScalarType residual_dtype, ScalarType? bias_dtype=None) -> "
      "(Tensor dinput, Tensor dresidual, Tensor dweight, Tensor dbias)");
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float eps=1e-06, float weight_offset=0., float dropout_p=0., bool post_norm=False, "
      "ScalarType? out_dtype=None, ScalarType? residual_dtype=None, *, Tensor? seed=None) -> "
      "(Tensor y, Tensor residual_out)",
      random);
  m.def(
      "add_rms_norm_fwd(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps, "
      "float weight_offset, Tensor? seed, float dropout_p, bool post_norm, bool keep_total, "
      "ScalarType? out_dtype, ScalarType? residual_dtype) -> "
      "(Tensor y, Tensor residual_out, Tensor total, Tensor rstd)");
  m.def(
      "add_rms_norm_bwd(Tensor dy, Tensor? dresidual_out, Tensor total, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor rstd, float weight_offset, Tensor? seed, float dropout_p, bool post_norm, "
      "bool[3] output_mask, ScalarType input_dtype, ScalarType residual_dtype) -> "
      "(Tensor dinput, Tensor dresidual, Tensor dweight)");
}

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["cpu_isa"] = fusedops::cpu::isa();
#ifdef FUSEDOPS_WITH_CUDA
  const int version = fusedops::cuda::toolkit_version();
  info["cuda"] = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  std::string archs = fusedops::cuda::arch_list();  // "800,900" -> "80;90"
  for (size_t at = 0; (at = archs.find("0,", at)) != std::string::npos;) archs.replace(at, 2, ";");
  archs.pop_back();
  info["archs"] = archs;
#else
  info["cuda"] = "";
  info["archs"] = "";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using fusedops::GradientList;
  m.def("build_info", &build_info);

  m.def("layer_norm", &fusedops::layer_norm, py::arg("input"), py::arg("normalized_shape"),
        py::arg("weight") = py::none(), py::arg("bias") = py::none(), py::arg("eps") = 1e-5,
        py::arg("out_dtype") = py::none(), NoGil());
  m.def("rms_norm", &fusedops::rms_norm, py::arg("input"), py::arg("normalized_shape"), py::arg("weight") = py::none(),
        py::arg("eps") = 1e-6, py::arg("weight_offset") = 0.0, py::arg("out_dtype") = py::none(), NoGil());
  m.def("add_layer_norm", &fusedops::add_layer_norm, py::arg("input"), py::arg("residual"), py::arg("normalized_shape"),
        py::arg("weight") = py::none(), py::arg("bias") = py::none(), py::arg("eps") = 1e-5, py::arg("dropout_p") = 0.0,
        py::arg("post_norm") = false, py::arg("out_dtype") = py::none(), py::arg("residual_dtype") = py::none(),
        py::arg("seed") = py::none(), NoGil());
  m.def("add_rms_norm", &fusedops::add_rms_norm, py::arg("input"), py::arg("residual"), py::arg("normalized_shape"),
        py::arg("weight") = py::none(), py::arg("eps") = 1e-6, py::arg("weight_offset") = 0.0,
        py::arg("dropout_p") = 0.0, py::arg("post_norm") = false, py::arg("out_dtype") = py::none(),
        py::arg("residual_dtype") = py::none(), py::arg("seed") = py::none(), NoGil());

  m.def("cross_entropy", &fusedops::cross_entropy, py::arg("input"), py::arg("target"), py::arg("weight") = py::none(),
        py::arg("ignore_index") = -100, py::arg("reduction") = "mean", py::arg("label_smoothing") = 0.0,
        py::arg("z_loss") = 0.0, py::arg("softcap") = py::none(), py::arg("inplace_backward") = false, NoGil());

  if (PyModule_AddFunctions(m.ptr(), fusedops::call_kind_methods) != 0) throw py::error_already_set();
  m.def("is_profiled", &at::hasCallbacks);
  m.def("same_objects", &fusedops::same_objects, py::arg("seen"), py::arg("containers"));
  py::class_<fusedops::AdamPlan>(m, "AdamPlan")
      .def(py::init<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>,
                    fusedops::OptionalTensors, fusedops::OptionalTensors, fusedops::OptionalTensors,
                    std::vector<at::Tensor>, std::vector<int64_t>, std::vector<int64_t>>(),
           py::arg("params"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("max_exp_avg_sq"), py::arg("master"),
           py::arg("compensation"), py::arg("step"), py::arg("group"), py::arg("index"))
      .def("prepare", &fusedops::AdamPlan::prepare, py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("amsgrad"), py::arg("maximize"), py::arg("seed"),
           py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(), py::arg("grad_norm") = py::none(),
           py::arg("max_grad_norm") = py::none(), NoGil())
      .def("launch", &fusedops::AdamPlan::launch, NoGil())
      .def(
          "grad_norm",
          [](const fusedops::AdamPlan& plan, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& found_inf) -> std::optional<at::Tensor> {
            const GradientList grads(plan.gradients());
            if (grads.tensors().empty()) return std::nullopt;
            const py::gil_scoped_release no_gil;
            return fusedops::grad_norm(grads.pointers(), grad_scale, found_inf);
          },
          py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none());
  py::class_<GradientList>(m, "GradientList")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("tensors"))
      .def("__len__", [](const GradientList& list) { return list.tensors().size(); })
      .def("__getitem__",
           [](const GradientList& list, size_t i) {
             if (i >= list.tensors().size()) throw py::index_error();
             return list.tensors()[i];
           })
      .def_property_readonly("largest", &GradientList::largest)
      .def_property_readonly("dtypes", &GradientList::dtypes);
  py::implicitly_convertible<py::list, GradientList>();
  m.def("gradients_of", &fusedops::gradients_of, py::arg("params"));
  m.def(
      "grad_norm",
      [](const GradientList& grads, const std::optional<at::Tensor>& grad_scale,
         const std::optional<at::Tensor>& found_inf) {
        return fusedops::grad_norm(grads.pointers(), grad_scale, found_inf);
      },
      py::arg("grads"), py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(), NoGil());
  m.def(
      "grad_scale_",
      [](const GradientList& grads, const at::Tensor& coef) { fusedops::grad_scale_(grads.pointers(), coef); },
      py::arg("grads"), py::arg("coef"), NoGil());
}
